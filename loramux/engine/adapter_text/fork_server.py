"""Forks the processes that interpret files of adapters: `python -m ...fork_server FD`.

It has imported the library and read the tokenizer of the base, so that a process is there in
milliseconds and shares that memory. It sees no file of an adapter itself.
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

from loramux.engine.adapter_text.child import serve
from loramux.engine.adapter_text.files import Base
from loramux.errors import InvalidRequest

_COMMAND_BYTES = 64


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(sys.stdin.buffer.read())
    base = Base(Path(settings["folder"]), settings["chat_template"])
    scratch = Path(settings["scratch"])
    _import_lazily_loaded(base)
    # The collector would copy the pages that processes share.
    gc.collect()
    gc.freeze()
    control.send(b"ready")
    while True:
        command, descriptors, _, _ = socket.recv_fds(control, _COMMAND_BYTES, 1)
        if not command:
            return
        name, _, number = command.decode().partition(" ")
        if name == "fork":
            control.send(str(_fork(control, descriptors[0], base, scratch)).encode())
        else:
            control.send(str(_end(int(number), scratch)).encode())


def _fork(control: socket.socket, descriptor: int, base: Base, scratch: Path) -> int:
    """Return the id of the new process, or 0 if there can be none now."""
    try:
        pid = os.fork()
    except OSError:
        pid = -1
    if pid == 0:
        control.close()
        serve(socket.socket(fileno=descriptor), base, scratch / str(os.getpid()))
    os.close(descriptor)
    return max(0, pid)


def _end(pid: int, scratch: Path) -> int:
    """End a process, and return its exit status, or minus the signal that ended it."""
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    shutil.rmtree(scratch / str(pid), ignore_errors=True)
    return os.waitstatus_to_exitcode(status)


def _import_lazily_loaded(base: Base) -> None:
    """Render templates, one of which fails, because processes may open no modules later."""
    template = "{{ messages | tojson }}{{ strftime_now('%d') }}{{ tools }}"
    messages = [{"role": "user", "content": "a"}]
    arguments = {"tools": [{"type": "function"}], "add_generation_prompt": True}
    base.tokenizer.render(messages, arguments, choose=lambda: template)
    with contextlib.suppress(InvalidRequest):
        base.tokenizer.render(messages, {}, choose=lambda: "{{ lipsum() }}{{ 1 // 0 }}")
    array.array("I", base.tokenizer.encode("a", add_special_tokens=False))


if __name__ == "__main__":
    main()
