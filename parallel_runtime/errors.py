"""Every exception this library raises on purpose.

ParallelRuntimeError
├── ConfigError (ValueError)                  a setting, or a combination of settings, is impossible
│   └── LauncherEnvironmentError              the variables a launcher left behind are missing, partial or contradict each other
├── ContextStateError (RuntimeError)          used before it was entered, after it was closed, or in another process
│   ├── GroupBusyError                        one group used from two threads at once
│   └── StaleContextError                     a captured graph outlived the context that it was captured in
├── ArgumentError (ValueError)                an argument of an operation breaks its rule (src out of range, bad splits)
├── DimError (IndexError)                     a tensor dim that the tensor does not have
├── DtypeError (TypeError)                    an operation that this dtype or this communicator does not support
├── SerializationError (TypeError)            an object cannot be encoded, or cannot be decoded where it arrived
├── PeerError (RuntimeError)                  another rank is at fault
│   ├── PeerTimeoutError (TimeoutError)       a member did not take part within the deadline
│   ├── PeerLostError (ConnectionError)       a member's process died or left the context
│   │   └── EarlierFailureError               nothing more moves here since an earlier operation failed
│   ├── CollectiveMismatchError               members entered different operations, shapes or dtypes
│   ├── PeerFailedError                       a member reported a failure of its own (agreement, encoding)
│   │   └── PeerEncodingError                 a member could not encode what it was to send (also a SerializationError)
│   └── RendezvousError                       the world did not come together: a rank is missing, differs or joined twice
├── LaunchError (RuntimeError)                ranks could not be started, or one of them failed
│   └── RankFailedError                       a rank raised, exited or was killed; carries its own traceback
├── CheckpointError (ValueError)              a model file is missing, damaged, or not what its config says
└── RequestError (ValueError)                 a serving request that can never be served as it is
    └── QueueFullError                        the engine is at its queue limit; try again later

Blame shows in the type: ``ConfigError`` is the settings, ``ContextStateError`` and ``ArgumentError`` the caller,
``PeerError`` another rank. Each leaf also inherits the builtin that a caller would guess.
"""

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "CollectiveMismatchError",
    "ConfigError",
    "ContextStateError",
    "DimError",
    "DtypeError",
    "EarlierFailureError",
    "GroupBusyError",
    "LaunchError",
    "LauncherEnvironmentError",
    "ParallelRuntimeError",
    "PeerEncodingError",
    "PeerError",
    "PeerFailedError",
    "PeerLostError",
    "PeerTimeoutError",
    "QueueFullError",
    "RankFailedError",
    "RendezvousError",
    "RequestError",
    "SerializationError",
    "StaleContextError",
]


class ParallelRuntimeError(Exception):
    """Base of every exception that this library raises on purpose."""


class ConfigError(ParallelRuntimeError, ValueError):
    """A setting, or a combination of settings, is impossible."""


class LauncherEnvironmentError(ConfigError):
    """The variables a launcher left behind are missing, partial or contradict each other."""


class ContextStateError(ParallelRuntimeError, RuntimeError):
    """Something was used before it was entered, after it was closed, or in another process."""


class GroupBusyError(ContextStateError):
    """One group was used from two threads at once."""


class StaleContextError(ContextStateError):
    """A captured graph was to run though the context that it was captured in is closed."""


class ArgumentError(ParallelRuntimeError, ValueError):
    """An argument of an operation breaks its rule; raised before anything is sent."""


class DimError(ParallelRuntimeError, IndexError):
    """A tensor dim that the tensor does not have; raised before anything is sent."""


class DtypeError(ParallelRuntimeError, TypeError):
    """This dtype or this communicator does not support the operation; raised before anything is sent."""


class SerializationError(ParallelRuntimeError, TypeError):
    """An object cannot be encoded, or cannot be decoded where it arrived."""


class PeerError(ParallelRuntimeError, RuntimeError):
    """Another rank is at fault.

    Attributes:
        ranks: World ranks at fault, as far as this rank could find out.
        members: Positions in the group that the failed operation waited for, where its communicator knows them.
    """

    ranks: tuple[int, ...] = ()
    members: tuple[int, ...] = ()


class PeerTimeoutError(PeerError, TimeoutError):
    """A member did not take part within the deadline."""


class PeerLostError(PeerError, ConnectionError):
    """A member's process died or left the context."""


class EarlierFailureError(PeerLostError):
    """Nothing more moves here since an earlier operation failed; the text tells of that one."""


class CollectiveMismatchError(PeerError):
    """Members entered different operations, or the same one with different shapes, dtypes or order."""


class PeerFailedError(PeerError):
    """A member reported a failure of its own, so that nobody waits for it."""


class PeerEncodingError(PeerFailedError, SerializationError):
    """A member could not encode the object it was to send; the group is as usable as before."""


class RendezvousError(PeerError):
    """The world did not come together: a rank is missing, differs from the others or joined twice."""


class LaunchError(ParallelRuntimeError, RuntimeError):
    """Ranks could not be started, or one of them failed."""


class RankFailedError(LaunchError):
    """A rank raised, exited or was killed.

    Attributes:
        rank: The rank that failed first.
        exitcode: Exit status of its process; negative for a signal; ``None`` where it raised or is a thread.
        remote_traceback: Its own traceback as text, or ``""`` where it left none.
    """

    def __init__(self, message: str, *, rank: int, exitcode: int | None = None, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.exitcode = exitcode
        self.remote_traceback = remote_traceback


class CheckpointError(ParallelRuntimeError, ValueError):
    """A model file is missing, damaged, or not what its config says."""


class RequestError(ParallelRuntimeError, ValueError):
    """A serving request that can never be served as it is."""


class QueueFullError(RequestError):
    """The engine is at its queue limit; the same request may be accepted later."""
