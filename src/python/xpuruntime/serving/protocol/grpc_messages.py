# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Messages of ``inference.GRPCInferenceService``, and those of Triton's extensions that are served."""

from __future__ import annotations

from xpuruntime.serving.protocol.schema import Enum, Field, Message

__all__ = ["CONFIG_ENUMS", "INFER_PARAMETER", "INFER_REQUEST", "INFER_RESPONSE", "METHODS", "STREAM_RESPONSE"]


def _repeated(number: int, kind: str | Message | Enum) -> Field:
    return Field(number, kind, repeated=True)


def _map(number: int, kind: str | Message | Enum, key: str = "string") -> Field:
    return Field(number, kind, key=key)


def _one(number: int, kind: str | Message) -> Field:
    return Field(number, kind, oneof=True)


INFER_PARAMETER = Message(
    bool_param=_one(1, "bool"),
    int64_param=_one(2, "int64"),
    string_param=_one(3, "string"),
    double_param=_one(4, "double"),
    uint64_param=_one(5, "uint64"),
)
_CONTENTS = Message(
    bool_contents=_repeated(1, "bool"),
    int_contents=_repeated(2, "int32"),
    int64_contents=_repeated(3, "int64"),
    uint_contents=_repeated(4, "uint32"),
    uint64_contents=_repeated(5, "uint64"),
    fp32_contents=_repeated(6, "float"),
    fp64_contents=_repeated(7, "double"),
    bytes_contents=_repeated(8, "bytes"),
)
_TENSOR = Message(
    name=Field(1, "string"),
    datatype=Field(2, "string"),
    shape=_repeated(3, "int64"),
    parameters=_map(4, INFER_PARAMETER),
    contents=Field(5, _CONTENTS),
)
INFER_REQUEST = Message(
    model_name=Field(1, "string"),
    model_version=Field(2, "string"),
    id=Field(3, "string"),
    parameters=_map(4, INFER_PARAMETER),
    inputs=_repeated(5, _TENSOR),
    outputs=_repeated(6, Message(name=Field(1, "string"), parameters=_map(2, INFER_PARAMETER))),
    raw_input_contents=_repeated(7, "bytes"),
)
INFER_RESPONSE = Message(
    model_name=Field(1, "string"),
    model_version=Field(2, "string"),
    id=Field(3, "string"),
    parameters=_map(4, INFER_PARAMETER),
    outputs=_repeated(5, _TENSOR),
    raw_output_contents=_repeated(6, "bytes"),
)
STREAM_RESPONSE = Message(error_message=Field(1, "string"), infer_response=Field(2, INFER_RESPONSE))

_EMPTY = Message()
_MODEL = Message(name=Field(1, "string"), version=Field(2, "string"))
_READY = Message(ready=Field(1, "bool"))
_TENSOR_METADATA = Message(name=Field(1, "string"), datatype=Field(2, "string"), shape=_repeated(3, "int64"))

_DURATION = Message(count=Field(1, "uint64"), ns=Field(2, "uint64"))
_BATCH_STATISTICS = Message(
    batch_size=Field(1, "uint64"),
    compute_input=Field(2, _DURATION),
    compute_infer=Field(3, _DURATION),
    compute_output=Field(4, _DURATION),
)
_STATISTICS = Message(
    name=Field(1, "string"),
    version=Field(2, "string"),
    last_inference=Field(3, "uint64"),
    inference_count=Field(4, "uint64"),
    execution_count=Field(5, "uint64"),
    inference_stats=Field(
        6,
        Message(
            success=Field(1, _DURATION),
            fail=Field(2, _DURATION),
            queue=Field(3, _DURATION),
            compute_input=Field(4, _DURATION),
            compute_infer=Field(5, _DURATION),
            compute_output=Field(6, _DURATION),
            cache_hit=Field(7, _DURATION),
            cache_miss=Field(8, _DURATION),
        ),
    ),
    batch_stats=_repeated(7, _BATCH_STATISTICS),
    memory_usage=_repeated(8, Message(type=Field(1, "string"), id=Field(2, "int64"), byte_size=Field(3, "uint64"))),
)

_DATA_TYPE = Enum({
    name: number
    for number, name in enumerate((
        "TYPE_INVALID", "TYPE_BOOL", "TYPE_UINT8", "TYPE_UINT16", "TYPE_UINT32", "TYPE_UINT64", "TYPE_INT8",
        "TYPE_INT16", "TYPE_INT32", "TYPE_INT64", "TYPE_FP16", "TYPE_FP32", "TYPE_FP64", "TYPE_STRING", "TYPE_BF16",
    ))
})  # fmt: skip
_INSTANCE_KIND = Enum(KIND_AUTO=0, KIND_GPU=1, KIND_CPU=2, KIND_MODEL=3)
_TIMEOUT_ACTION = Enum(REJECT=0, DELAY=1)
#: The enumerations of a model's configuration, by their names in ``model_config.proto``.
CONFIG_ENUMS = {"DataType": _DATA_TYPE, "Kind": _INSTANCE_KIND, "TimeoutAction": _TIMEOUT_ACTION}

_QUEUE_POLICY = Message(
    timeout_action=Field(1, _TIMEOUT_ACTION),
    default_timeout_microseconds=Field(2, "uint64"),
    allow_timeout_override=Field(3, "bool"),
    max_queue_size=Field(4, "uint32"),
)
_RESHAPE = Message(shape=_repeated(1, "int64"))
_CONFIG = Message(
    name=Field(1, "string"),
    platform=Field(2, "string"),
    version_policy=Field(
        3,
        Message(
            latest=_one(1, Message(num_versions=Field(1, "uint32"))),
            all=_one(2, _EMPTY),
            specific=_one(3, Message(versions=_repeated(1, "int64"))),
        ),
    ),
    max_batch_size=Field(4, "int32"),
    input=_repeated(
        5,
        Message(
            name=Field(1, "string"),
            data_type=Field(2, _DATA_TYPE),
            dims=_repeated(4, "int64"),
            reshape=Field(5, _RESHAPE),
            allow_ragged_batch=Field(7, "bool"),
            optional=Field(8, "bool"),
        ),
    ),
    output=_repeated(
        6,
        Message(
            name=Field(1, "string"),
            data_type=Field(2, _DATA_TYPE),
            dims=_repeated(3, "int64"),
            label_filename=Field(4, "string"),
            reshape=Field(5, _RESHAPE),
        ),
    ),
    instance_group=_repeated(
        7,
        Message(
            name=Field(1, "string"),
            count=Field(2, "int32"),
            gpus=_repeated(3, "int32"),
            kind=Field(4, _INSTANCE_KIND),
        ),
    ),
    default_model_filename=Field(8, "string"),
    dynamic_batching=_one(
        11,
        Message(
            preferred_batch_size=_repeated(1, "int32"),
            max_queue_delay_microseconds=Field(2, "uint64"),
            preserve_ordering=Field(3, "bool"),
            priority_levels=Field(4, "uint64"),
            default_priority_level=Field(5, "uint64"),
            default_queue_policy=Field(6, _QUEUE_POLICY),
            priority_queue_policy=_map(7, _QUEUE_POLICY, "uint64"),
        ),
    ),
    parameters=_map(14, Message(string_value=Field(1, "string"))),
    backend=Field(17, "string"),
    model_transaction_policy=Field(19, Message(decoupled=Field(1, "bool"))),
    runtime=Field(25, "string"),
)

_REPOSITORY_PARAMETER = Message(
    bool_param=_one(1, "bool"),
    int64_param=_one(2, "int64"),
    string_param=_one(3, "string"),
    bytes_param=_one(4, "bytes"),
)
_REPOSITORY_MODEL = Message(
    repository_name=Field(1, "string"),
    model_name=Field(2, "string"),
    parameters=_map(3, _REPOSITORY_PARAMETER),
)

#: Method to its request and response. ``ModelInfer`` has codecs of its own: `infer_decoding`, `infer_encoding`.
METHODS: dict[str, tuple[Message, Message]] = {
    "ServerLive": (_EMPTY, Message(live=Field(1, "bool"))),
    "ServerReady": (_EMPTY, _READY),
    "ModelReady": (_MODEL, _READY),
    "ServerMetadata": (
        _EMPTY,
        Message(name=Field(1, "string"), version=Field(2, "string"), extensions=_repeated(3, "string")),
    ),
    "ModelMetadata": (
        _MODEL,
        Message(
            name=Field(1, "string"),
            versions=_repeated(2, "string"),
            platform=Field(3, "string"),
            inputs=_repeated(4, _TENSOR_METADATA),
            outputs=_repeated(5, _TENSOR_METADATA),
            properties=_map(6, "string"),
        ),
    ),
    "ModelInfer": (INFER_REQUEST, INFER_RESPONSE),
    "ModelStreamInfer": (INFER_REQUEST, STREAM_RESPONSE),
    "ModelConfig": (_MODEL, Message(config=Field(1, _CONFIG))),
    "ModelStatistics": (_MODEL, Message(model_stats=_repeated(1, _STATISTICS))),
    "RepositoryIndex": (
        Message(repository_name=Field(1, "string"), ready=Field(2, "bool")),
        Message(
            models=_repeated(
                1,
                Message(
                    name=Field(1, "string"),
                    version=Field(2, "string"),
                    state=Field(3, "string"),
                    reason=Field(4, "string"),
                ),
            )
        ),
    ),
    "RepositoryModelLoad": (_REPOSITORY_MODEL, _EMPTY),
    "RepositoryModelUnload": (_REPOSITORY_MODEL, _EMPTY),
}
