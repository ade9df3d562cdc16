"""A Model Context Protocol server that misbehaves in the way that its first argument names."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

KIND = sys.argv[1]
calls = 0


def out(message: Any) -> None:
    print(message if isinstance(message, str) else json.dumps(message), flush=True)


def answer(number: int) -> None:
    def ok(result: Any) -> None:
        out({"jsonrpc": "2.0", "id": number, "result": result})

    fine = {"content": [{"type": "text", "text": "fine"}]}
    odd: dict[str, Any] = {
        "null": None,
        "content": {"content": "x"},
        "part": {"content": [{"type": "text", "text": None}, 5]},
        "structured": {"structuredContent": {"a": 1}, "content": []},
    }
    if KIND in odd:
        ok(odd[KIND])
    elif KIND == "error":
        out({"jsonrpc": "2.0", "id": number, "error": "bad"})
    else:
        if KIND == "lines":
            for line in ({"id": [1]}, [1], "[" * 100_000, {"id": {}}, {"id": str(number), "result": {}}, "\udcff"):
                out(json.dumps(line) if not isinstance(line, str) else line.encode(errors="replace").decode())
        if KIND == "asks":
            out({"jsonrpc": "2.0", "id": number, "method": "roots/list"})
            out({"jsonrpc": "2.0", "id": "p", "method": "ping"})
            told = [json.loads(sys.stdin.readline()) for _ in range(2)]
            assert told[0]["error"]["code"] == -32601 and told[1] == {"jsonrpc": "2.0", "id": "p", "result": {}}
        ok(fine)


for line in sys.stdin:
    message = json.loads(line)
    if message.get("method") == "initialize":
        out({"jsonrpc": "2.0", "id": message["id"], "result": {}})
    elif message.get("method") == "tools/list":
        tools: Any = {"names": ["e"], "nameless": [{}], "none": None}.get(KIND, [{"name": "e"}])
        more = {"nextCursor": "1"} if KIND == "endless" else {}
        out({"jsonrpc": "2.0", "id": message["id"], "result": {"tools": tools, **more}})
        if KIND == "deaf":
            time.sleep(600)
    elif message.get("method") == "tools/call":
        answer(message["id"])
