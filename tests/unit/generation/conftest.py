# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Folders with a tiny random decoder, written once; tests that change one copy it."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest
from generation_folders import BEGIN, END, VOCABULARY, write_folder, write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder in fp32. Not to be changed."""
    return write_folder(tmp_path_factory.mktemp("decoder") / "fp32")


@pytest.fixture(scope="session")
def int4_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder with weights in int4, which computes in int8. Not to be changed."""
    return write_folder(tmp_path_factory.mktemp("decoder") / "int4", level=4)


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """Return a copy of a folder that the test may change."""

    def copied(folder: Path) -> Path:
        number = len(list(tmp_path.iterdir()))
        return shutil.copytree(folder, tmp_path / f"copy{number}")

    return copied


@pytest.fixture(scope="session")
def llama() -> Any:
    """A tiny random decoder of transformers in fp32. Not to be changed."""
    torch = pytest.importorskip("torch", reason="needs torch")
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]  # an incomplete one ends the import
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=BEGIN, eos_token_id=END, pad_token_id=END,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def llama_folder(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder, with a tokenizer of bytes. Not to be changed."""
    folder = tmp_path_factory.mktemp("llama") / "llama"
    llama.save_pretrained(folder)
    write_tokenizer(folder)
    return folder
