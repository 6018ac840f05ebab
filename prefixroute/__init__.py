"""Independent LLM engines act as one prefix cache.

Each node mirrors its own engine's KV cache exactly, nodes gossip compact digests, and a node that receives a prompt
decides by itself, in microseconds, whether to serve it or to forward it once. Start at `Node`.
"""

from _thread import get_ident

from .endpoint.table import EndpointHandle
from .errors import DecodeError, NoEndpointError, PrefixRouteError, UsageError
from .events import (
    AddressFailed,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    ClockJumped,
    ContentSpan,
    DatagramRejected,
    Differs,
    DomainMismatch,
    EngineBatch,
    EngineEvent,
    Namespace,
    NodeEvent,
    PeerChanged,
    PushBackChanged,
    ReplicaChanged,
    ResidencyChanged,
    StreamGap,
    StreamRestarted,
    TokensDiffer,
    UnknownEvent,
)
from .fairness import Entry, FairQueue, FairSettings, FairStats
from .keys.chain import TokenChain
from .keys.domain import Domain
from .keys.tenants import EVERYBODY, Tenants
from .load import LoadReport, PushBackSettings, PushBackState
from .node import Node
from .policy.baselines import GreedyCost, LeastLoad, LongestMatch, NoRouting
from .policy.interface import Candidate, Choice, Policy, Request, Withheld
from .policy.rent_or_buy import POLICIES, RentOrBuy
from .replication.outbox import Datagram
from .residency.mirror import Residency
from .routing.decision import Decision, Explanation, Outcome, OutcomeKind, Veto
from .routing.trust import Accuracy
from .routing.zones import ZoneRule, Zones
from .settings import NodeSettings
from .stats import Digest, EndpointStats, NodeStats, RoundTrip, TenantStats

__version__ = "0.1.0"

# The core imports no thread: which one calls a node is asked of the interpreter here, and only compared there.
Node.thread_id = staticmethod(get_ident)

__all__ = [
    "EVERYBODY",
    "POLICIES",
    "Accuracy",
    "AddressFailed",
    "BlocksCleared",
    "BlocksRemoved",
    "BlocksStored",
    "Candidate",
    "Choice",
    "ClockJumped",
    "ContentSpan",
    "Datagram",
    "DatagramRejected",
    "Decision",
    "DecodeError",
    "Differs",
    "Digest",
    "Domain",
    "DomainMismatch",
    "EndpointHandle",
    "EndpointStats",
    "EngineBatch",
    "EngineEvent",
    "Entry",
    "Explanation",
    "FairQueue",
    "FairSettings",
    "FairStats",
    "GreedyCost",
    "LeastLoad",
    "LoadReport",
    "LongestMatch",
    "Namespace",
    "NoEndpointError",
    "NoRouting",
    "Node",
    "NodeEvent",
    "NodeSettings",
    "NodeStats",
    "Outcome",
    "OutcomeKind",
    "PeerChanged",
    "Policy",
    "PrefixRouteError",
    "PushBackChanged",
    "PushBackSettings",
    "PushBackState",
    "RentOrBuy",
    "ReplicaChanged",
    "Request",
    "Residency",
    "ResidencyChanged",
    "RoundTrip",
    "StreamGap",
    "StreamRestarted",
    "TenantStats",
    "Tenants",
    "TokenChain",
    "TokensDiffer",
    "UnknownEvent",
    "UsageError",
    "Veto",
    "Withheld",
    "ZoneRule",
    "Zones",
    "__version__",
]
