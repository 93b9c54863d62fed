"""Around onceflow: the demos, chaos runs and benchmarks, and the helpers of its own tests.

Its commands are those of ``onceflow`` through the entry point ``onceflow.commands``. This module is loaded with each
``onceflow --help``, so it imports nothing.
"""

#: By name: where the command is (``module:attribute``), and its line in ``onceflow --help``.
COMMANDS = {
    "bench": ("onceflow_workshop.cli.bench:bench", "Measure throughput and latency on this machine."),
    "chaos": ("onceflow_workshop.cli.chaos:chaos", "Inject faults around running flows, and check what they wrote."),
    "demo": ("onceflow_workshop.cli.demo:demo", "Run an example service, crash it, and check its outputs."),
}
