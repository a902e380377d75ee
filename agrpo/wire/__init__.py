"""The channel between the rollout process and trainer rank 0: authenticated, framed, arrays as buffers, no pickle.

    rollout  -- Ready, Resolved, Metrics, EvalResult, LoopState -->  trainer rank 0 (listens)
    rollout  <-- Start, VersionUpdate, Credit, RunEval, StopEval, AskState, Finish --  trainer rank 0

Both ends prove they know the run's key (HMAC over two nonces) before the first frame. A frame is
`u32 header length, u64 payload length, header (MessagePack), payload (array buffers back to back)`.
Order is kept in each direction; what is held is bounded by the admission credit (STA-4), not by the channel.
"""

from agrpo.wire.codec import (
    AskState,
    Credit,
    EvalResult,
    Finish,
    LoopState,
    Message,
    Metrics,
    Resolved,
    RunEval,
    Start,
    StopEval,
    VersionUpdate,
    WireError,
    decode,
    encode,
    frame,
    frames,
)
from agrpo.wire.link import Link, connect
from agrpo.wire.listener import Listener

__all__ = [
    "AskState",
    "Credit",
    "EvalResult",
    "Finish",
    "Link",
    "Listener",
    "LoopState",
    "Message",
    "Metrics",
    "Resolved",
    "RunEval",
    "Start",
    "StopEval",
    "VersionUpdate",
    "WireError",
    "connect",
    "decode",
    "encode",
    "frame",
    "frames",
]
