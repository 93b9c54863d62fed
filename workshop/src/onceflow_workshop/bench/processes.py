"""What processes cost: CPU time and memory, read from ``/proc``."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

#: In the environment of Python workers, so that each variant has its own.
MARK = "ONCEFLOW_BENCH_MARK"
_TICKS = os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    """From ``/proc/PID/stat``: ``begun`` (clock ticks since the machine's start) makes a pid unique."""

    parent: int
    cpu_s: float
    begun: int


def stat_of(text: str) -> Process:
    """Of a ``/proc/PID/stat``; CPU seconds of the process itself."""
    fields = text.rpartition(")")[2].split()
    return Process(int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[19]))


def busy_of(text: str) -> float:
    """CPU seconds of everybody on the machine, of a ``/proc/stat``."""
    user, nice, system, _, _, irq, softirq = map(int, text.splitlines()[0].split()[1:8])
    return (user + nice + system + irq + softirq) / _TICKS


def memory_of(text: str) -> tuple[float, float]:
    """Resident and anonymous MiB of a ``/proc/PID/status``."""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    kib = [int(fields[name].split()[0]) if name in fields else 0 for name in ("VmRSS", "RssAnon")]
    return kib[0] / 1024, kib[1] / 1024


class Meter:
    """CPU time of all who take part, and the peak memory of the Python workers that bear a mark."""

    def __init__(self, jvm: int, broker: Sequence[int], mark: str) -> None:
        self._jvm_pid, self._broker, self._mark = jvm, broker, f"{MARK}={mark}".encode()
        self._workers: dict[int, bool] = {}
        self._spent: dict[tuple[int, int], float] = {}  # by workers, also those that have ended
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._begun = self._cpu()
        self.rss_mib: float | None = None
        self.anon_mib: float | None = None

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def reset(self) -> None:
        """Count CPU time from here."""
        self._begun = self._cpu()

    def cpu_s(self) -> dict[str, float]:
        """Seconds since the last reset, by who spent them; ``others``: whatever else runs on this machine."""
        return {name: seconds - self._begun[name] for name, seconds in self._cpu().items()}

    def _cpu(self) -> dict[str, float]:
        with self._lock:
            stats = dict(_stats())
            for pid in below(self._jvm_pid, stats):
                self._spent[pid, stats[pid].begun] = stats[pid].cpu_s
            spent = {
                "driver": time.process_time(),
                "jvm": stats[self._jvm_pid].cpu_s if self._jvm_pid in stats else 0.0,
                "workers": sum(self._spent.values()),
                "broker": sum(stats[pid].cpu_s for pid in self._broker if pid in stats),
            }
            everybody = _read("stat").decode()
        return {**spent, "others": busy_of(everybody) - sum(spent.values()) if everybody else 0.0}

    def _watch(self) -> None:
        scanned = float("-inf")
        while not self._done.wait(0.1):
            if time.monotonic() - scanned > 1:
                scanned = time.monotonic()
                self._cpu()  # so that the time of workers that end is not lost
                for pid in below(self._jvm_pid, dict(_stats())):
                    if not self._workers.get(pid):
                        self._workers[pid] = self._mark in _read(f"{pid}/environ").split(b"\0")
            for pid in [pid for pid, ours in self._workers.items() if ours]:
                text = _read(f"{pid}/status").decode()
                if text:
                    rss, anon = memory_of(text)
                    self.rss_mib, self.anon_mib = max(self.rss_mib or 0, rss), max(self.anon_mib or 0, anon)


class Usage:
    """CPU time and memory of some processes and of all that descend from them, from one moment on.

    What a process has used since the last `look` is lost when it ends.

    Args:
        roots: these processes; a function is asked for them at every look.
    """

    def __init__(self, roots: Sequence[int] | Callable[[], Sequence[int]]) -> None:
        self._roots = roots if callable(roots) else lambda: roots
        self._spent: dict[tuple[int, int], float] = {}  # also by those that have ended
        self.restart()

    def restart(self) -> None:
        """Count from here."""
        self.max_rss_mib: float | None = None
        self.look()
        self._begun_s, self._begun_at = self.cpu_s, time.monotonic()

    def look(self) -> None:
        """Read what they have used so far. Memory is the sum of all resident pages; shared ones count in each."""
        stats = dict(_stats())
        rss = 0.0
        for pid in [each for root in self._roots() for each in (root, *below(root, stats)) if each in stats]:
            self._spent[pid, stats[pid].begun] = stats[pid].cpu_s
            if text := _read(f"{pid}/status").decode(errors="replace"):
                rss += memory_of(text)[0]
        if rss:
            self.max_rss_mib = max(self.max_rss_mib or 0.0, rss)

    @property
    def cpu_s(self) -> float:
        """CPU seconds at the last look, since these processes began."""
        return sum(self._spent.values())

    @property
    def cpu_s_since(self) -> float:
        """CPU seconds from the restart to the last look."""
        return self.cpu_s - self._begun_s

    def cpu_percent(self) -> float | None:
        """Percent of a core since the restart; None: the system does not tell, or there is no process."""
        self.look()
        seconds = time.monotonic() - self._begun_at
        return 100 * self.cpu_s_since / seconds if self._spent and seconds > 0 else None


def processes_of_machine() -> dict[int, Process]:
    """All that run, by pid; none where the system does not tell."""
    return dict(_stats())


def nbytes_on_disk(folder: Path) -> int:
    """What the files below a folder take: stores have files with holes."""
    size = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it is deleted just now
            size += file.lstat().st_blocks * 512
    return size


def machine_busy_s() -> float | None:
    """CPU seconds of everybody on the machine since its start; None: the system does not tell."""
    text = _read("stat").decode()
    return busy_of(text) if text else None


def _read(name: str) -> bytes:
    try:
        return Path("/proc", name).read_bytes()
    except OSError:  # it has ended, or this is no Linux
        return b""


def _stats() -> Iterator[tuple[int, Process]]:
    for name in os.listdir("/proc") if _read("stat") else []:
        text = _read(f"{name}/stat").decode(errors="replace") if name.isdigit() else ""
        if text:
            yield int(name), stat_of(text)


def below(root: int, stats: Mapping[int, Process]) -> list[int]:
    """Processes that descend from one."""
    children: dict[int, list[int]] = {}
    for pid, process in stats.items():
        children.setdefault(process.parent, []).append(pid)
    found, rest = [], list(children.get(root, []))
    while rest:
        found.append(rest.pop())
        rest += children.get(found[-1], [])
    return found


def worker_memory(meters: Sequence[Meter]) -> dict[str, float | None]:
    """Peak MiB of a worker, None when there was none."""
    rss = [meter.rss_mib for meter in meters if meter.rss_mib is not None]
    anon = [meter.anon_mib for meter in meters if meter.anon_mib is not None]
    return {
        "max_worker_rss_mib": round(max(rss), 1) if rss else None,
        "max_worker_anon_mib": round(max(anon), 1) if anon else None,
    }
