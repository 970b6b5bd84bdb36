# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Messages of ``inference.GRPCInferenceService``, of Triton's extensions and of health, read and written by protobuf.

They are in a pool of their own: two packages that register the same messages in protobuf's cannot be in one process,
and a server must not decide which clients can be imported beside it. Inference has
codecs of its own in `infer_messages`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, MutableSequence
from typing import Any

from xpuruntime.serving.protocol.wire import malformed

#: Methods of the service; each has a request and a response of its name.
METHODS = (
    "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer", "ModelStreamInfer",
    "ModelConfig", "ModelStatistics", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload",
)  # fmt: skip
#: Bytes of a message that is not for inference, at most.
_LONGEST = 64 << 10
_PACKAGE = "xpuruntime_inference"
_SIMPLE = {
    "double": 1, "float": 2, "int64": 3, "uint64": 4, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13,
}  # fmt: skip
_FIELD = re.compile(r"(oneof |repeated |)(\S+) (\w+) (\d+)")
#: Messages and enumerations with their fields, those within others behind them.
_FIELDS = """
enum DataType: TYPE_INVALID 0, TYPE_BOOL 1, TYPE_UINT8 2, TYPE_UINT16 3, TYPE_UINT32 4, TYPE_UINT64 5, TYPE_INT8 6,
  TYPE_INT16 7, TYPE_INT32 8, TYPE_INT64 9, TYPE_FP16 10, TYPE_FP32 11, TYPE_FP64 12, TYPE_STRING 13, TYPE_BF16 14
message ModelInstanceGroup: string name 1, ModelInstanceGroup.Kind kind 4, int32 count 2, repeated int32 gpus 3,
  repeated ModelInstanceGroup.SecondaryDevice secondary_devices 8, repeated string profile 5, bool passive 7, string
  host_policy 9
enum ModelInstanceGroup.Kind: KIND_AUTO 0, KIND_GPU 1, KIND_CPU 2, KIND_MODEL 3
message ModelInstanceGroup.SecondaryDevice: ModelInstanceGroup.SecondaryDevice.SecondaryDeviceKind kind 1, int64
  device_id 2
enum ModelInstanceGroup.SecondaryDevice.SecondaryDeviceKind: KIND_NVDLA 0
message ModelTensorReshape: repeated int64 shape 1
message ModelInput: string name 1, DataType data_type 2, ModelInput.Format format 3, repeated int64 dims 4,
  ModelTensorReshape reshape 5, bool is_shape_tensor 6, bool allow_ragged_batch 7, bool optional 8, bool
  is_non_linear_format_io 9
enum ModelInput.Format: FORMAT_NONE 0, FORMAT_NHWC 1, FORMAT_NCHW 2
message ModelOutput: string name 1, DataType data_type 2, repeated int64 dims 3, ModelTensorReshape reshape 5, string
  label_filename 4, bool is_shape_tensor 6, bool is_non_linear_format_io 7
message ModelVersionPolicy: oneof ModelVersionPolicy.Latest latest 1, oneof ModelVersionPolicy.All all 2, oneof
  ModelVersionPolicy.Specific specific 3
message ModelVersionPolicy.Latest: uint32 num_versions 1
message ModelVersionPolicy.All:
message ModelVersionPolicy.Specific: repeated int64 versions 1
message ModelQueuePolicy: ModelQueuePolicy.TimeoutAction timeout_action 1, uint64 default_timeout_microseconds 2, bool
  allow_timeout_override 3, uint32 max_queue_size 4
enum ModelQueuePolicy.TimeoutAction: REJECT 0, DELAY 1
message ModelDynamicBatching: repeated int32 preferred_batch_size 1, uint64 max_queue_delay_microseconds 2, bool
  preserve_ordering 3, uint64 priority_levels 4, uint64 default_priority_level 5, ModelQueuePolicy
  default_queue_policy 6, map<uint64;ModelQueuePolicy> priority_queue_policy 7
message ModelParameter: string string_value 1
message ModelTransactionPolicy: bool decoupled 1
message ModelConfig: string name 1, string platform 2, string backend 17, string runtime 25, ModelVersionPolicy
  version_policy 3, int32 max_batch_size 4, repeated ModelInput input 5, repeated ModelOutput output 6, oneof
  ModelDynamicBatching dynamic_batching 11, repeated ModelInstanceGroup instance_group 7, string
  default_model_filename 8, map<string;string> cc_model_filenames 9, map<string;string> metric_tags 10,
  map<string;ModelParameter> parameters 14, ModelTransactionPolicy model_transaction_policy 19
message ServerLiveRequest:
message ServerLiveResponse: bool live 1
message ServerReadyRequest:
message ServerReadyResponse: bool ready 1
message ModelReadyRequest: string name 1, string version 2
message ModelReadyResponse: bool ready 1
message ServerMetadataRequest:
message ServerMetadataResponse: string name 1, string version 2, repeated string extensions 3
message ModelMetadataRequest: string name 1, string version 2
message ModelMetadataResponse: string name 1, repeated string versions 2, string platform 3, repeated
  ModelMetadataResponse.TensorMetadata inputs 4, repeated ModelMetadataResponse.TensorMetadata outputs 5,
  map<string;string> properties 6
message ModelMetadataResponse.TensorMetadata: string name 1, string datatype 2, repeated int64 shape 3
message InferParameter: oneof bool bool_param 1, oneof int64 int64_param 2, oneof string string_param 3, oneof double
  double_param 4, oneof uint64 uint64_param 5
message InferTensorContents: repeated bool bool_contents 1, repeated int32 int_contents 2, repeated int64
  int64_contents 3, repeated uint32 uint_contents 4, repeated uint64 uint64_contents 5, repeated float fp32_contents
  6, repeated double fp64_contents 7, repeated bytes bytes_contents 8
message ModelInferRequest: string model_name 1, string model_version 2, string id 3, map<string;InferParameter>
  parameters 4, repeated ModelInferRequest.InferInputTensor inputs 5, repeated
  ModelInferRequest.InferRequestedOutputTensor outputs 6, repeated bytes raw_input_contents 7
message ModelInferRequest.InferInputTensor: string name 1, string datatype 2, repeated int64 shape 3,
  map<string;InferParameter> parameters 4, InferTensorContents contents 5
message ModelInferRequest.InferRequestedOutputTensor: string name 1, map<string;InferParameter> parameters 2
message ModelInferResponse: string model_name 1, string model_version 2, string id 3, map<string;InferParameter>
  parameters 4, repeated ModelInferResponse.InferOutputTensor outputs 5, repeated bytes raw_output_contents 6
message ModelInferResponse.InferOutputTensor: string name 1, string datatype 2, repeated int64 shape 3,
  map<string;InferParameter> parameters 4, InferTensorContents contents 5
message ModelStreamInferResponse: string error_message 1, ModelInferResponse infer_response 2
message ModelConfigRequest: string name 1, string version 2
message ModelConfigResponse: ModelConfig config 1
message ModelStatisticsRequest: string name 1, string version 2
message StatisticDuration: uint64 count 1, uint64 ns 2
message InferStatistics: StatisticDuration success 1, StatisticDuration fail 2, StatisticDuration queue 3,
  StatisticDuration compute_input 4, StatisticDuration compute_infer 5, StatisticDuration compute_output 6,
  StatisticDuration cache_hit 7, StatisticDuration cache_miss 8
message InferResponseStatistics: StatisticDuration compute_infer 1, StatisticDuration compute_output 2,
  StatisticDuration success 3, StatisticDuration fail 4, StatisticDuration empty_response 5, StatisticDuration cancel
  6
message InferBatchStatistics: uint64 batch_size 1, StatisticDuration compute_input 2, StatisticDuration compute_infer
  3, StatisticDuration compute_output 4
message MemoryUsage: string type 1, int64 id 2, uint64 byte_size 3
message ModelStatistics: string name 1, string version 2, uint64 last_inference 3, uint64 inference_count 4, uint64
  execution_count 5, InferStatistics inference_stats 6, repeated InferBatchStatistics batch_stats 7, repeated
  MemoryUsage memory_usage 8, map<string;InferResponseStatistics> response_stats 9
message ModelStatisticsResponse: repeated ModelStatistics model_stats 1
message ModelRepositoryParameter: oneof bool bool_param 1, oneof int64 int64_param 2, oneof string string_param 3,
  oneof bytes bytes_param 4
message RepositoryIndexRequest: string repository_name 1, bool ready 2
message RepositoryIndexResponse: repeated RepositoryIndexResponse.ModelIndex models 1
message RepositoryIndexResponse.ModelIndex: string name 1, string version 2, string state 3, string reason 4
message RepositoryModelLoadRequest: string repository_name 1, string model_name 2,
  map<string;ModelRepositoryParameter> parameters 3
message RepositoryModelLoadResponse:
message RepositoryModelUnloadRequest: string repository_name 1, string model_name 2,
  map<string;ModelRepositoryParameter> parameters 3
message RepositoryModelUnloadResponse:
message HealthCheckRequest: string service 1
message HealthCheckResponse: HealthCheckResponse.ServingStatus status 1
enum HealthCheckResponse.ServingStatus: UNKNOWN 0, SERVING 1, NOT_SERVING 2
"""


def encode(name: str, value: Mapping[str, Any]) -> bytes:
    """Return a dictionary as the message that it is; keys that the message has not are left out."""
    from google.protobuf import json_format

    message = json_format.ParseDict(value, message_classes()[name](), ignore_unknown_fields=True)
    data: bytes = message.SerializeToString()
    return data


def decode(name: str, data: bytes) -> dict[str, Any]:
    """Return a message as a dictionary, which has only the fields that were sent. Raises `ServingError`."""
    from google.protobuf.message import DecodeError

    if len(data) > _LONGEST:
        raise malformed(f"it has {len(data)} bytes, and at most {_LONGEST} are read of one without tensors")
    try:
        return _plain(message_classes()[name].FromString(data))
    except DecodeError:
        raise malformed("protobuf cannot read it") from None


def _plain(message: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for field, value in message.ListFields():
        if isinstance(value, Mapping):
            entry = field.message_type.fields_by_name["value"]
            plain[field.name] = {key: _plain_value(entry, value[key]) for key in value}
        elif isinstance(value, MutableSequence):
            plain[field.name] = [_plain_value(field, item) for item in value]
        else:
            plain[field.name] = _plain_value(field, value)
    return plain


def _plain_value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return _plain(value)
    if field.enum_type is not None and value in field.enum_type.values_by_number:
        return field.enum_type.values_by_number[value].name
    return value


@functools.cache
def message_classes() -> Mapping[str, Any]:
    """Return protobuf's class of each message."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    known: dict[str, Any] = {}
    fields: list[tuple[str, str]] = []
    for kind, name, text in re.findall(r"^(message|enum) ([\w.]+):(.*(?:\n  .*)*)", _FIELDS, re.MULTILINE):
        owner, _, last = name.rpartition(".")
        listed = " ".join(text.split())
        if kind == "enum":
            known[name] = (known[owner] if owner else file).enum_type.add(name=last)
            for word, number in re.findall(r"(\w+) (\d+)", listed):
                known[name].value.add(name=word, number=int(number))
        else:
            known[name] = known[owner].nested_type.add(name=last) if owner else file.message_type.add(name=last)
            fields.append((name, listed))
    for name, listed in fields:
        for label, kind, field, number in _FIELD.findall(listed):
            _add_field(known, name, label, kind, field, int(number))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name, _ in fields
    }


def _add_field(known: Mapping[str, Any], owner: str, label: str, kind: str, name: str, number: int) -> None:
    message = known[owner]
    field = message.field.add(name=name, number=number, label=3 if label == "repeated " else 1)
    if label == "oneof ":
        if not message.oneof_decl:
            message.oneof_decl.add(name="choice")
        field.oneof_index = 0
    entry = re.fullmatch(r"map<(\w+);([\w.]+)>", kind)
    if entry is None:
        _set_kind(field, kind, known)
        return
    title = "".join(part.capitalize() for part in name.split("_")) + "Entry"
    inner = message.nested_type.add(name=title)
    inner.options.map_entry = True
    _set_kind(inner.field.add(name="key", number=1, label=1), entry[1], known)
    _set_kind(inner.field.add(name="value", number=2, label=1), entry[2], known)
    field.label = 3
    field.type, field.type_name = 11, f".{_PACKAGE}.{owner}.{title}"


def _set_kind(field: Any, kind: str, known: Mapping[str, Any]) -> None:
    if kind in _SIMPLE:
        field.type = _SIMPLE[kind]
    else:
        field.type, field.type_name = 14 if hasattr(known[kind], "value") else 11, f".{_PACKAGE}.{kind}"
