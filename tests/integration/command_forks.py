"""Runs commands as processes that begin quickly: a process that has imported everything forks for each of them.

Each line of its standard input is a JSON object: ``arguments``, and ``stdin``, ``stdout`` and ``stderr`` (paths of
files). It answers with the process id, and after a line ``wait PID`` with the exit code.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import traceback

from onceflow.cli.main import commands, main

for target, _ in commands().values():
    importlib.import_module(target.partition(":")[0])
for name in (
    "change.move", "change.progress_import", "change.repartition", "change.reset", "doctor.checks", "records.parked",
    "records.claim_collector", "records.topic_excerpt", "status.flow_status_reader", "transactions.transaction_abort",
    "verify.audit",
):  # fmt: skip
    importlib.import_module(f"onceflow.admin.{name}")
importlib.import_module("onceflow.tables.table")
# A test calls it a hundred times, and each call adds a partition.
vars(sys.modules["onceflow.admin.change.repartition"])["_KNOWN_S"] = 0.0

for line in sys.stdin:
    if line.startswith("wait "):
        _, status = os.waitpid(int(line.split()[1]), 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
        continue
    call = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(call["stdin"], os.O_RDONLY), 0)
        for number, stream in enumerate(("stdout", "stderr"), 1):
            os.dup2(os.open(call[stream], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        faulthandler.enable()  # who waits too long for this process ends it by SIGABRT, and reads where it was
        try:
            main(call["arguments"])
        except SystemExit as ended:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ended.code if isinstance(ended.code, int) else 1)
        except BaseException:  # as Python itself would
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(70)  # an exception that is no exit
    print(pid, flush=True)
