"""What must be true of a process before it may start ranks, and before it may speak for one."""

import multiprocessing
import os
import sys
import traceback
from contextlib import suppress
from multiprocessing import process
from pathlib import Path
from types import FrameType, ModuleType

from parallel_runtime.config.environment import current_environ, detect
from parallel_runtime.errors import LauncherEnvironmentError, LaunchError

__all__ = [
    "UNGUARDED_STATUS",
    "end_forked_copy",
    "refuse_launched_rank",
    "refuse_removed_directory",
    "refuse_unguarded_main",
    "unguarded_error",
]

UNGUARDED_STATUS = 78
"""Exit status by which a rank tells its parent that importing the script launched again."""


def end_forked_copy(pid: int) -> None:
    """End a process that was forked inside a rank and came to the end of the rank's function: it does not speak for the rank.

    Nothing is closed or reported, since that is the rank's. To be called in a ``finally``; what was raised shows on stderr.

    Args:
        pid: Of the rank.
    """
    if os.getpid() == pid:
        return
    error = sys.exception()
    status = 0
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        status = 1
        with suppress(Exception):
            traceback.print_exception(error)
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status & 0xFF)


def unguarded_error() -> LaunchError:
    """The error of a script that launches while it is imported.

    Returns:
        It names the script and the guard.
    """
    script = getattr(sys.modules["__main__"], "__file__", None) or "the script"
    return LaunchError(
        f"ranks were launched at the top level of {script}, outside its main guard. Every rank imports that file again to find "
        f"its function, and would launch again. Put the call under the guard:\n\n"
        '    if __name__ == "__main__":\n        launch(...)'
    )


def refuse_unguarded_main() -> None:
    """Stop a script without a main guard before it starts processes without end, and one that is not in a file.

    A rank that is importing its parent's script leaves at once and in silence; its parent tells the story, once.

    Raises:
        LaunchError: The script is running its top level, and nothing in it asks for ``__name__``; or it came through a pipe.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(UNGUARDED_STATUS)
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is None and hasattr(main, "__file__") and not _script_path(main).is_file():
        raise LaunchError(
            f"every rank imports the main script, and {main.__file__!r} is not a file it could import; save the script to a file"
        )
    if _runs_its_top_level(main) and "__name__" not in _source(main):
        raise unguarded_error()


def refuse_launched_rank() -> None:
    """Stop a rank of a launched world from launching.

    Raises:
        LaunchError: A launcher has already made this process one of several ranks.
    """
    try:
        identity = detect(current_environ(), needs_master=False)
    except LauncherEnvironmentError:
        return  # leftovers; the ranks started here get variables of their own
    if identity.world_size > 1:
        raise LaunchError(
            f"this process is already rank {identity.rank} of {identity.world_size} ({identity.source}); a rank opens "
            f"`with ParallelContext(config) as ctx:`, it does not launch others. To launch ranks, start the script as one process"
        )


def refuse_removed_directory() -> None:
    """Stop a process whose working directory is gone, where no other could start.

    Raises:
        LaunchError: It was removed.
    """
    try:
        Path.cwd()
    except OSError as error:
        raise LaunchError(
            "ranks start in the working directory of this process, which was removed; change to one that exists, by os.chdir(...)"
        ) from error


def _runs_its_top_level(main: ModuleType) -> bool:
    frame: FrameType | None = sys._getframe()
    while frame and not (frame.f_code.co_name == "<module>" and frame.f_globals is main.__dict__):
        frame = frame.f_back
    return frame is not None


def _script_path(main: ModuleType) -> Path:
    """Where ranks will look for the script, also after a change of directory."""
    return Path(vars(process)["ORIGINAL_DIR"] or "", main.__file__ or "")


def _source(main: ModuleType) -> str:
    """Text of the script; one that cannot be read counts as guarded."""
    try:
        return _script_path(main).read_text(encoding="utf-8")
    except (AttributeError, OSError, UnicodeDecodeError):
        return "__name__"
