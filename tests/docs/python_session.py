"""A Python session of a page: runs each block that it reads, and prints the exit code and the output."""

import contextlib
import io
import json
import sys
import traceback

sys.path[0] = ""
names, replies = {"__name__": "__main__"}, sys.stdout
for line in sys.stdin:
    output, code = io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            exec(compile(json.loads(line), "<page>", "exec"), names)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            code = 1
    print(json.dumps([code, output.getvalue()]), file=replies, flush=True)
