"""The public names of `boundedkv`."""

from boundedkv.backends import available_backends, build
from boundedkv.config import BoundedKVConfig, BoundedKVSpec, SinkWindow
from boundedkv.manager import BoundedKVManager
from boundedkv.numerics import NUMERICS_VERSION
from boundedkv.plan import PLAN_VERSION, BoundedPlan, RowLayout
from boundedkv.resource import EngineResourceInfo, Resource
from boundedkv.selftest import DeviceSelfTestError, SelfTestReport, self_test
from boundedkv.session import Session
from boundedkv.step import (
    ADMIT_OK,
    AdmitOutcome,
    AdmitRuntimeError,
    AllocationFailed,
    BoundedKVStep,
    BucketKey,
    GraphSlotSpec,
    Segment,
    SlotLease,
    StepContext,
    StreamPosition,
)

__all__ = [
    "ADMIT_OK",
    "NUMERICS_VERSION",
    "PLAN_VERSION",
    "AdmitOutcome",
    "AdmitRuntimeError",
    "AllocationFailed",
    "BoundedKVConfig",
    "BoundedKVManager",
    "BoundedKVSpec",
    "BoundedKVStep",
    "BoundedPlan",
    "BucketKey",
    "DeviceSelfTestError",
    "EngineResourceInfo",
    "GraphSlotSpec",
    "Resource",
    "RowLayout",
    "Segment",
    "SelfTestReport",
    "Session",
    "SinkWindow",
    "SlotLease",
    "StepContext",
    "StreamPosition",
    "available_backends",
    "build",
    "self_test",
]
