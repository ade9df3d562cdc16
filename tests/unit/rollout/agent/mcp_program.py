"""A Model Context Protocol server as small as it can be: echo, fail, hang, leave."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

NAMES = ("echo", "fail", "hang", "leave")


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": {}}
    if method == "tools/list":  # on two pages
        page = NAMES[:2] if not params.get("cursor") else NAMES[2:]
        tools = [{"name": name, "description": name, "inputSchema": {"type": "object"}} for name in page]
        return {"tools": tools, **({"nextCursor": "2"} if not params.get("cursor") else {})}
    if params["name"] == "hang":
        time.sleep(600)
    if params["name"] == "leave":
        os._exit(1)
    failed = params["name"] == "fail"
    return {"content": [{"type": "text", "text": json.dumps(params["arguments"])}], "isError": failed}


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        print("some talk of its own", flush=True)
        result = answer(message["method"], message.get("params", {}))
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
