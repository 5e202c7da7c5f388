"""The system calls of a writer on one directory, by ptrace: recorded, or the writer killed at any of them.

What the kernel is asked counts: Python's os module, C++ streams and other threads alike, with nothing to
compile or preload. Linux on x86-64 and AArch64. Each traced function runs in a forked child.
"""

import ctypes
import os
import platform
import signal
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

# Calls by what their arguments are: P path, D directory descriptor + path, F descriptor; two of them for two.
_LAYOUT: dict[str, str] = {
    **dict.fromkeys(
        "open creat truncate mkdir rmdir unlink chmod stat lstat access statfs readlink".split(), "P"
    ),
    **dict.fromkeys(
        "openat openat2 mkdirat unlinkat newfstatat statx faccessat faccessat2 fchmodat".split(), "D"
    ),
    **dict.fromkeys(["rename", "link"], "PP"),
    **dict.fromkeys(["renameat", "renameat2", "linkat"], "DD"),
    **dict.fromkeys(
        "write pwrite64 writev pwritev fsync fdatasync ftruncate fallocate close read pread64 readv fstat "
        "getdents64 lseek fadvise64 sync_file_range copy_file_range sendfile fchmod".split(),
        "F",
    ),
}
_NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {
        **{"read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "lseek": 8},
        **{
            "pread64": 17,
            "pwrite64": 18,
            "readv": 19,
            "writev": 20,
            "access": 21,
            "sendfile": 40,
            "fsync": 74,
        },
        **{
            "fdatasync": 75,
            "truncate": 76,
            "ftruncate": 77,
            "rename": 82,
            "mkdir": 83,
            "rmdir": 84,
            "creat": 85,
        },
        **{
            "link": 86,
            "unlink": 87,
            "readlink": 89,
            "chmod": 90,
            "fchmod": 91,
            "statfs": 137,
            "getdents64": 217,
        },
        **{
            "fadvise64": 221,
            "openat": 257,
            "mkdirat": 258,
            "newfstatat": 262,
            "unlinkat": 263,
            "renameat": 264,
        },
        **{"linkat": 265, "fchmodat": 268, "faccessat": 269, "sync_file_range": 277, "fallocate": 285},
        **{"pwritev": 296, "renameat2": 316, "copy_file_range": 326, "statx": 332, "openat2": 437},
        **{"faccessat2": 439},
    },
    "aarch64": {
        **{"mkdirat": 34, "unlinkat": 35, "linkat": 37, "renameat": 38, "statfs": 43, "truncate": 45},
        **{"ftruncate": 46, "fallocate": 47, "faccessat": 48, "fchmod": 52, "fchmodat": 53, "openat": 56},
        **{"close": 57, "getdents64": 61, "lseek": 62, "read": 63, "write": 64, "readv": 65, "writev": 66},
        **{"pread64": 67, "pwrite64": 68, "pwritev": 70, "sendfile": 71, "newfstatat": 79, "fstat": 80},
        **{"fsync": 82, "fdatasync": 83, "sync_file_range": 84, "fadvise64": 223, "renameat2": 276},
        **{"copy_file_range": 285, "statx": 291, "openat2": 437, "faccessat2": 439},
    },
}
_LOOKS = set(
    "stat lstat fstat statx newfstatat access faccessat faccessat2 statfs readlink getdents64 read pread64 "
    "readv lseek fadvise64".split()
)
_NAMES = {number: name for name, number in _NUMBERS.get(platform.machine(), {}).items()}
_AT_FDCWD = 0xFFFFFF9C
_MARK = 900  # descriptor of /dev/null in the child; what is written there is a mark of ours

_TRACEME, _SYSCALL, _SETOPTIONS, _GET_SYSCALL_INFO = 0, 24, 0x4200, 0x420E
_OPTIONS = (
    1 | 2 | 4 | 8 | 0x100000
)  # stops of calls are told apart; forks and threads too; die with the tracer
_WALL = 0x40000000

Moment = Literal["before", "within"]


class _SyscallInfo(ctypes.Structure):
    _fields_ = [
        ("op", ctypes.c_uint8),  # 1 entry, 2 exit
        ("pad", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("instruction_pointer", ctypes.c_uint64),
        ("stack_pointer", ctypes.c_uint64),
        ("number_or_result", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64 * 7),
    ]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, pid: int, address: object = None, data: object = None) -> None:
    if _libc.ptrace(request, pid, address, data) == -1:
        raise OSError(ctypes.get_errno(), f"ptrace {request}: {os.strerror(ctypes.get_errno())}")


@dataclass(frozen=True)
class Call:
    """One call on the directory. Paths are relative to it; `mark` is a note by `mark()`, in `data`."""

    name: str
    path: str = ""
    target: str = ""  # of rename and link
    flags: int = 0  # of open
    offset: int = 0  # of a write; the length of truncate
    data: bytes = b""
    result: int = 0  # as the kernel gives it: below 0 is -errno


@dataclass
class Trace:
    """What happened: every call in order, whether the child was killed, else its exit code."""

    calls: list[Call] = field(default_factory=list)
    killed: bool = False
    code: int = 0


def mark(text: str) -> None:
    """A note between the calls, from inside the traced function."""
    with suppress(OSError):
        os.write(_MARK, text.encode())


def can_trace() -> bool:
    """Whether this machine lets a process trace its child, and the calls are known."""
    try:
        with tempfile.TemporaryDirectory() as directory:
            calls = trace(lambda: os.mkdir(Path(directory, "seen")), Path(directory)).calls
    except OSError:
        return False
    return any(call.name.startswith("mkdir") for call in calls)


def trace(function: Callable[[], object], root: Path, kill_at: tuple[int, Moment] | None = None) -> Trace:
    """Run `function` in a child and watch its calls on `root` and below.

    With `kill_at` (n, "before") the child is killed before its n-th call (from 0) has any effect; "within"
    kills it half-way through a write, or when another call has taken effect but not returned. Raises
    OSError where nothing can be traced.
    """
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), _MARK)
            _ptrace(_TRACEME, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            function()
            os._exit(0)
        except BaseException as error:  # noqa: B036 - the child must not run on into the caller's frames
            os.write(2, f"traced child: {type(error).__name__}: {error}\n".encode())
            os._exit(3)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSTOPPED(status):
        raise OSError(f"the child cannot be traced: {os.waitstatus_to_exitcode(status)}")
    _ptrace(_SETOPTIONS, pid, None, _OPTIONS)
    try:
        return _Tracer(pid, os.path.realpath(root), kill_at).run()
    except BaseException:  # a kernel that cannot tell, or Ctrl-C: the child must not stay
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, _WALL)
        raise


@dataclass
class _Tracer:
    pid: int
    root: str
    kill_at: tuple[int, Moment] | None
    _seen: int = 0
    _entered: dict[int, tuple[Call, bool]] = field(default_factory=dict)  # by thread: call, kill at its exit

    def run(self) -> Trace:
        found = Trace()
        alive, pass_on, thread = {self.pid}, 0, self.pid
        _ptrace(_SYSCALL, thread)
        while alive:
            thread, status = os.waitpid(-1, _WALL)
            alive.add(thread)
            if not os.WIFSTOPPED(status):
                alive.discard(thread)
                if thread == self.pid:
                    found.killed = os.WIFSIGNALED(status)
                    found.code = 0 if found.killed else os.WEXITSTATUS(status)
                continue
            stop, pass_on = os.WSTOPSIG(status), 0
            if stop == signal.SIGTRAP | 0x80:
                if self._at_call(thread, found.calls):
                    os.kill(self.pid, signal.SIGKILL)
                    continue
            elif stop not in (signal.SIGTRAP, signal.SIGSTOP):
                pass_on = stop
            with suppress(ProcessLookupError):
                _ptrace(_SYSCALL, thread, None, pass_on)
        return found

    def _at_call(self, thread: int, calls: list[Call]) -> bool:
        """Whether the child dies here."""
        info = _SyscallInfo()
        try:
            _ptrace(_GET_SYSCALL_INFO, thread, ctypes.sizeof(info), ctypes.addressof(info))
        except ProcessLookupError:
            return False
        if info.op == 2:
            call, dies = self._entered.pop(thread, (None, False))
            if call is not None:
                result = ctypes.c_int64(info.number_or_result).value
                calls.append(
                    replace(call, result=result, data=call.data[: max(result, 0)] if result else b"")
                )
            return dies
        name = _NAMES.get(info.number_or_result)
        if name is None:
            return False
        arguments = list(info.arguments)
        if name == "write" and arguments[0] == _MARK:
            calls.append(Call("mark", data=self._memory(thread, arguments[1], arguments[2])))
            return False
        call = self._on_root(thread, name, arguments)
        if call is None:
            return False
        index, self._seen = self._seen, self._seen + 1
        dies = self.kill_at is not None and self.kill_at[0] == index
        if dies and self.kill_at is not None and self.kill_at[1] == "before":
            return True
        if dies and "write" in name:
            self._write_half(thread, arguments[0], call)
            return True
        self._entered[thread] = (call, dies)
        return False

    def _on_root(self, thread: int, name: str, arguments: list[int]) -> Call | None:
        layout, paths, position = _LAYOUT[name], [], 0
        for kind in layout:
            if kind == "F":
                paths.append(self._descriptor(thread, arguments[position]))
                position += 1
            else:
                base = "" if kind == "P" else self._base(thread, arguments[position])
                position += kind == "D"
                paths.append(self._resolve(thread, base, arguments[position]))
                position += 1
        if not any(path == self.root or path.startswith(self.root + "/") for path in paths):
            return None
        relative = [os.path.relpath(path, self.root) if path else "" for path in paths] + [""]
        call = Call(name, relative[0], relative[1])
        if name in ("open", "openat"):
            return replace(call, flags=arguments[position])
        if name in ("truncate", "ftruncate"):
            return replace(call, offset=arguments[position])
        return self._written(thread, call, arguments) if "write" in name else call

    def _written(self, thread: int, call: Call, arguments: list[int]) -> Call:
        if call.name in ("write", "pwrite64"):
            data = self._memory(thread, arguments[1], arguments[2])
        else:
            parts = self._memory(thread, arguments[1], 16 * arguments[2])
            data = b"".join(self._memory(thread, *pair) for pair in struct.iter_unpack("QQ", parts))
        if call.name in ("pwrite64", "pwritev"):
            return replace(call, data=data, offset=arguments[3])
        facts = Path(f"/proc/{thread}/fdinfo/{arguments[0]}").read_text().split()
        offset = int(facts[facts.index("pos:") + 1])
        if int(facts[facts.index("flags:") + 1], 8) & os.O_APPEND:
            offset = os.stat(f"/proc/{thread}/fd/{arguments[0]}").st_size
        return replace(call, data=data, offset=offset)

    @staticmethod
    def _write_half(thread: int, descriptor: int, call: Call) -> None:
        file = os.open(f"/proc/{thread}/fd/{descriptor}", os.O_WRONLY)
        try:
            os.pwrite(file, call.data[: len(call.data) // 2], call.offset)
        finally:
            os.close(file)

    def _resolve(self, thread: int, base: str, address: int) -> str:
        text = os.fsdecode(self._text(thread, address)) if address else ""
        if not text.startswith("/"):
            text = f"{base or os.readlink(f'/proc/{thread}/cwd')}/{text}"
        return os.path.normpath(text)

    def _base(self, thread: int, descriptor: int) -> str:
        return "" if descriptor & 0xFFFFFFFF == _AT_FDCWD else self._descriptor(thread, descriptor)

    @staticmethod
    def _descriptor(thread: int, descriptor: int) -> str:
        try:
            return os.readlink(f"/proc/{thread}/fd/{descriptor & 0xFFFFFFFF}").removesuffix(" (deleted)")
        except OSError:
            return ""

    @staticmethod
    def _memory(thread: int, address: int, length: int) -> bytes:
        with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            parts = []
            while length > 0 and (part := memory.read(length)):
                parts.append(part)
                length -= len(part)
            return b"".join(parts)

    def _text(self, thread: int, address: int) -> bytes:
        """A C string: read up to the end of its page, since the next one may not be there."""
        found = b""
        while b"\0" not in found:
            found += self._memory(thread, address + len(found), 4096 - (address + len(found)) % 4096)
        return found.partition(b"\0")[0]


def points(function: Callable[[], object], root: Path) -> list[tuple[int, Moment]]:
    """Every place where `function` can be killed: before each call, and within those that change something.

    It is run once to find them: start from the same state again.
    """
    calls = [call for call in trace(function, root).calls if call.name != "mark"]
    found: list[tuple[int, Moment]] = []
    for index, call in enumerate(calls):
        found.append((index, "before"))
        if call.name not in _LOOKS:
            found.append((index, "within"))
    return found
