"""The inside of an interpreter that runs a program and then a test's statements; started as text, with `python -c`.

It reads main.py, so it stands on its own. The statements, and the mark that says that their end was reached, are asked
for after the program has ended: neither is in a file or in memory while the program runs.
"""

from __future__ import annotations

import os
import sys
import types


def exam(tell: int, take: int) -> None:
    """Run main.py as a module named `main`, then the statements that come by `take` in its names; answer by `tell`."""
    # Bound before the program may put something else in their places.
    read, write, leave, build, run = os.read, os.write, os._exit, compile, exec
    settrace, setprofile = sys.settrace, sys.setprofile
    for fd in (tell, take):
        os.set_inheritable(fd, False)  # what the program starts must not answer
    ticket = read(take, 32)
    main = types.ModuleType("main")
    main.__file__ = "main.py"
    sys.modules["main"], sys.argv = main, ["main.py"]
    names = vars(main)
    with open("main.py", "rb") as file:
        run(build(file.read(), "main.py", "exec", dont_inherit=True, optimize=0), names)
    settrace(None)
    setprofile(None)
    write(tell, ticket)
    text = b""
    while part := read(take, 1 << 16):
        text += part
    # Whatever the interpreter was told: assertions count.
    run(build(text[32:], "test", "exec", dont_inherit=True, optimize=0), names)
    write(tell, text[:32])
    leave(0)


if __name__ == "__main__":
    exam(int(sys.argv[1]), int(sys.argv[2]))
