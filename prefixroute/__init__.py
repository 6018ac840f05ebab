"""Independent LLM engines act as one prefix cache.

Each node mirrors its own engine's KV cache exactly, nodes gossip compact digests, and a node that receives a prompt
decides by itself, in microseconds, whether to serve it or to forward it once. Start at `Node`.
"""

from .errors import DecodeError, NoEndpointError, PrefixRouteError, UsageError
from .events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    ContentSpan,
    DatagramRejected,
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

__all__ = [
    "EVERYBODY",
    "POLICIES",
    "Accuracy",
    "BlocksCleared",
    "BlocksRemoved",
    "BlocksStored",
    "Candidate",
    "Choice",
    "ContentSpan",
    "Datagram",
    "DatagramRejected",
    "Decision",
    "DecodeError",
    "Digest",
    "Domain",
    "DomainMismatch",
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
    "UnknownEvent",
    "UsageError",
    "Veto",
    "Withheld",
    "ZoneRule",
    "Zones",
    "__version__",
]
