# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Finding, loading and listing vendor libraries, on files made here and on this process."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from xpuruntime.errors import EngineError, InputError
from xpuruntime.runtime.libraries.loading import (
    LibraryIndex,
    libraries_needed_by,
    library_identity,
    loaded_libraries,
    preload,
)
from xpuruntime.runtime.libraries.search import SearchFolder, read_elf, search_folders, wheel_versions
from xpuruntime.runtime.packages import install_command
from xpuruntime.runtime.snapshot import package_libraries

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="shared objects of Linux")


def build(folder: Path, soname: str, *needs: Path | str, body: str = "int answer(void) { return 42; }") -> Path:
    """Compile a real shared library whose file name is its soname."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "source.c"
    source.write_text(body)
    named = (os.environ.get("CC", "cc"), "gcc", os.environ.get("CXX", "c++"))
    compiler = next(filter(None, map(shutil.which, named)), None)
    assert compiler, "building this project needs a compiler, so does this test"
    out = folder / soname
    command = [compiler, "-shared", "-fPIC", "-o", out, source, f"-Wl,-soname,{soname}", "-Wl,--no-as-needed", *needs]
    subprocess.run(list(map(str, command)), check=True)
    source.unlink()
    return out


def bytes_read() -> int:
    """Return how many bytes this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def index(*places: tuple[Path, str], cache: tuple[str, ...] = (), platform: str = "linux") -> LibraryIndex:
    return LibraryIndex([SearchFolder(path=str(path), origin=origin) for path, origin in places], cache, platform)


def touch(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


def in_new_process(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class TestSearchOrder:
    def test_both_wheel_layouts_then_cuda_home_then_the_path_variable(self, tmp_path: Path) -> None:
        site, home, extra = tmp_path / "site", tmp_path / "cuda", tmp_path / "extra"
        for folder in (site / "nvidia/cu13/lib", site / "nvidia/cublas/lib", site / "tensorrt_libs"):
            folder.mkdir(parents=True)
        (site / "scipy_openblas32/lib").mkdir(parents=True)
        (home / "lib64").mkdir(parents=True)
        extra.mkdir()
        env = {"CUDA_HOME": str(home), "CUDA_PATH": str(tmp_path / "gone"), "LD_LIBRARY_PATH": f"{extra}::/nowhere"}
        places = [(folder.path, folder.origin) for folder in search_folders(env, [str(site)], "linux")]
        assert [place for place in places if place[1] != "default"] == [
            (str(site / "nvidia/cu13/lib"), "wheel"),
            (str(site / "nvidia/cublas/lib"), "wheel"),
            (str(site / "tensorrt_libs"), "wheel"),
            (str(site / "scipy_openblas32/lib"), "wheel"),
            (str(home / "lib64"), "CUDA_HOME"),
            (str(extra), "LD_LIBRARY_PATH"),
        ]

    def test_windows_looks_in_bin_folders_and_path(self, tmp_path: Path) -> None:
        site = tmp_path / "site"
        (site / "nvidia/cu13/bin/x86_64").mkdir(parents=True)
        tools = touch(tmp_path / "tools", "cudart64_13.dll")
        places = search_folders({"PATH": str(tools)}, [str(site)], "win32")
        assert [place.origin for place in places] == ["wheel", "wheel", "PATH"]
        found = index((tools, "PATH"), platform="win32").find("cudart", 13)
        assert [library.name for library in found] == ["cudart64_13.dll"]
        assert index((tools, "PATH"), platform="win32").find("cudart", 12) == []

    def test_nothing_installed_is_no_error(self) -> None:
        assert all(folder.origin == "default" for folder in search_folders({}, [], "linux"))
        assert search_folders({}, [], "darwin") == ()


class TestFind:
    def test_shadowing_is_visible_in_search_order(self, tmp_path: Path) -> None:
        first = touch(tmp_path / "a", "libcudnn.so.9.1.0")
        (first / "libcudnn.so.9").symlink_to("libcudnn.so.9.1.0")
        (first / "libcudnn.so").symlink_to("libcudnn.so.9")
        second = touch(tmp_path / "b", "libcudnn.so.9.7.1", "libcudnn_ops.so.9")
        found = index((first, "wheel"), (second, "LD_LIBRARY_PATH")).find("cudnn")
        assert [(lib.name, lib.version, lib.origin) for lib in found] == [
            ("libcudnn.so.9", "9.1.0", "wheel"),
            ("libcudnn.so.9.7.1", "9.7.1", "LD_LIBRARY_PATH"),
        ]

    def test_major_version_selects(self, tmp_path: Path) -> None:
        folder = touch(tmp_path, "libcublasLt.so.12", "libcublasLt.so.13", "libcublas.so.13")
        places = index((folder, "CUDA_HOME"))
        assert [lib.name for lib in places.find("cublasLt", 13)] == ["libcublasLt.so.13"]
        assert len(places.find("cublasLt")) == 2
        assert places.find("cublasLt", 11) == []
        assert [lib.name for lib in places.find_soname("libcublas.so.13")] == ["libcublas.so.13"]
        assert places.find_soname("not a soname") == []

    def test_the_linkers_cache_comes_last(self, tmp_path: Path) -> None:
        folder = touch(tmp_path / "a", "libcurand.so.10.1")
        cached = touch(tmp_path / "b", "libcurand.so.10.2")
        found = index((folder, "wheel"), cache=(str(cached / "libcurand.so.10.2"),)).find("curand", 10)
        assert [(lib.version, lib.origin) for lib in found] == [("10.1", "wheel"), ("10.2", "ldconfig")]

    def test_a_wheel_tells_the_version_its_file_name_does_not(self, tmp_path: Path) -> None:
        touch(tmp_path / "nvidia/cublas/lib", "libcublas.so.13")
        meta = tmp_path / "nvidia_cublas-13.1.0.3.dist-info"
        meta.mkdir()
        (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cublas\nVersion: 13.1.0.3\n")
        (meta / "RECORD").write_text("nvidia/cublas/lib/libcublas.so.13,,\n")
        code = (
            "import msgspec; from xpuruntime.runtime.libraries.loading import find_library;"
            "print(msgspec.json.encode(find_library('cublas')).decode())"
        )
        path = os.pathsep.join([str(tmp_path), *sys.path])
        [found, *_] = json.loads(in_new_process(code, PYTHONPATH=path))
        assert (found["version"], found["origin"]) == ("13.1.0.3", "wheel")
        assert wheel_versions([str(tmp_path)]) == {str(tmp_path / "nvidia/cublas/lib/libcublas.so.13"): "13.1.0.3"}


@linux
class TestElf:
    def test_needed_and_soname(self, tmp_path: Path) -> None:
        inner = build(tmp_path, "libinner.so.3")
        outer = build(tmp_path, "libouter.so.1", inner)
        assert read_elf(outer).soname == "libouter.so.1"
        assert read_elf(outer).needed[0] == "libinner.so.3"

    def test_the_build_id_is_the_linkers(self, tmp_path: Path) -> None:
        assert read_elf(build(tmp_path, "libone.so.1", "-Wl,--build-id=0xabcdef0123")).build_id == "abcdef0123"
        assert read_elf(build(tmp_path, "libnone.so.1", "-Wl,--build-id=none")).build_id is None
        one = build(tmp_path / "a", "libsame.so.1", "-Wl,--build-id=sha1")
        other = build(tmp_path / "b", "libsame.so.1", "-Wl,--build-id=sha1", body="int answer(void) { return 43; }")
        assert len(read_elf(one).build_id or "") == 40
        assert read_elf(one).build_id != read_elf(other).build_id

    def test_of_a_large_library_the_headers_alone_are_read(self, tmp_path: Path) -> None:
        path = build(tmp_path, "liblarge.so.1", "-Wl,--build-id=sha1")
        os.truncate(path, 700 << 20)
        before = bytes_read()
        identity = library_identity(str(path))
        assert bytes_read() - before < 1 << 20
        assert (identity["size"], len(identity["build_id"])) == (700 << 20, 40)

    def test_a_truncated_note_is_survived(self, tmp_path: Path) -> None:
        data = build(tmp_path, "libone.so.1", "-Wl,--build-id=0xabcdef0123").read_bytes()
        broken = tmp_path / "broken.so"
        for length in range(0, 1200, 7):
            broken.write_bytes(data[:length])
            with contextlib.suppress(InputError):
                assert read_elf(broken).build_id in (None, "abcdef0123")

    def test_the_libraries_of_a_package_with_their_builds(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        needed = build(tmp_path / "cuda", "libcublasLt.so.13", "-Wl,--build-id=0x02")
        build(tmp_path / "vendor_package" / "capi", "libengine.so.1.2.3", needed, "-Wl,--build-id=0x01")
        (tmp_path / "vendor_package" / "capi" / "libtext.so").write_text("no library")
        monkeypatch.syspath_prepend(str(tmp_path))
        # Wheels of CUDA may be installed, and their libraries loaded.
        places = (SearchFolder(path=str(tmp_path / "cuda"), origin="LD_LIBRARY_PATH"),)
        module = "xpuruntime.runtime.snapshot"
        monkeypatch.setattr(f"{module}.LibraryIndex", lambda: LibraryIndex(places, ()))
        monkeypatch.setattr(f"{module}.loaded_libraries", lambda: ())
        own, cuda = package_libraries(("vendor_package/capi/*.so*", "missing_package/*.so*"), cuda=True)
        assert [(one.name, one.version, one.build_id) for one in own] == [
            ("libengine.so.1.2.3", "1.2.3", "01"),
            ("libtext.so", None, None),
        ]
        assert own[1].size == len("no library")
        assert [(one.name, one.build_id) for one in cuda] == [("libcublasLt.so.13", "02")]
        assert package_libraries(("vendor_package/capi/*.so*",), cuda=False) == (own, ())

    @pytest.mark.parametrize("length", [0, 3, 16, 40, 100, 700])
    def test_a_truncated_file_is_refused(self, tmp_path: Path, length: int) -> None:
        data = build(tmp_path, "libwhole.so.1").read_bytes()
        broken = tmp_path / "broken.so"
        broken.write_bytes(data[:length])
        with pytest.raises(InputError, match=r"broken\.so"):
            read_elf(broken)

    def test_every_flipped_byte_of_the_headers_is_survived(self, tmp_path: Path) -> None:
        data = build(tmp_path, "libwhole.so.1").read_bytes()
        broken = tmp_path / "broken.so"
        outcomes = set()
        for place in range(4, 64 + 56 * 4):
            broken.write_bytes(data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :])
            try:
                read_elf(broken)
                outcomes.add("read")
            except InputError:
                outcomes.add("refused")
        assert outcomes == {"read", "refused"}

    def test_other_files_are_refused(self, tmp_path: Path) -> None:
        text = tmp_path / "libtext.so"
        text.write_text("/* GNU ld script */\nGROUP ( libc.so.6 )\n")
        with pytest.raises(InputError, match="does not begin as an ELF file does"):
            read_elf(text)
        with pytest.raises(InputError, match="cannot read"):
            read_elf(tmp_path / "missing.so")

    def test_what_the_cuda_provider_needs_is_read_from_it(self) -> None:
        spec = importlib.util.find_spec("onnxruntime")
        assert spec is not None
        assert spec.origin is not None
        provider = Path(spec.origin).parent / "capi/libonnxruntime_providers_cuda.so"
        if not provider.exists():
            pytest.skip("this ONNX Runtime wheel has no CUDA provider")
        linked, later = libraries_needed_by(provider)
        assert {name.split(".so")[0] for name in linked} >= {"libcublasLt", "libcublas", "libcudart"}
        assert "libcuda.so.1" not in linked
        assert any(name.startswith("libcudnn.so") for name in (*linked, *later))


@linux
class TestPreload:
    CODE = """
import json
from xpuruntime.runtime.libraries.loading import LibraryIndex, loaded_libraries, preload
from xpuruntime.runtime.libraries.search import SearchFolder
index = LibraryIndex([SearchFolder(path=p, origin="wheel") for p in {places!r}], ())
first = preload({names!r}, index=index)
again = preload({names!r}, index=index)
print(json.dumps([[l.path for l in first], [l.path for l in again], [l.path for l in loaded_libraries(("libcu*",))]]))
"""

    def test_loads_what_is_needed_from_another_place_first(self, tmp_path: Path) -> None:
        inner = build(tmp_path / "a", "libcublasLt.so.13")
        outer = build(tmp_path / "b", "libcublas.so.13", inner)
        names, places = ["libcublas.so.13"], [str(tmp_path / "b"), str(tmp_path / "a")]
        first, again, loaded = json.loads(in_new_process(self.CODE.format(places=places, names=names)))
        assert first == again == [str(outer)]
        assert {str(inner), str(outer)} <= set(loaded)

    def test_a_copy_already_loaded_is_kept(self, tmp_path: Path) -> None:
        mine = build(tmp_path / "a", "libcudart.so.13")
        build(tmp_path / "b", "libcudart.so.13")
        code = f"import ctypes; ctypes.CDLL({str(mine)!r})\n" + self.CODE.format(
            places=[str(tmp_path / "b")], names=["libcudart.so.13"]
        )
        first, _, loaded = json.loads(in_new_process(code))
        assert first == [str(mine)]
        assert [path for path in loaded if "cudart" in path] == [str(mine)]

    def test_the_next_place_is_used_when_a_file_is_corrupt(self, tmp_path: Path) -> None:
        touch(tmp_path / "a", "libcurand.so.10")
        good = build(tmp_path / "b", "libcurand.so.10")
        code = self.CODE.format(places=[str(tmp_path / "a"), str(tmp_path / "b")], names=["libcurand.so.10"])
        assert json.loads(in_new_process(code))[0] == [str(good)]

    # Of versions that no other test has loaded in this process.
    def test_failure_names_library_places_and_extra(self, tmp_path: Path) -> None:
        touch(tmp_path, "libcufft.so.77")
        places = index((tmp_path, "CUDA_HOME"))
        with pytest.raises(EngineError) as missing:
            preload(["libcudnn.so.77"], index=places)
        text = str(missing.value)
        assert "libcudnn.so.77 cannot be loaded: it was not found" in text
        assert f"{tmp_path} (CUDA_HOME)" in text
        assert f"Fix: {install_command('cuda')}" in text
        with pytest.raises(EngineError, match=r"libcufft\.so\.77 cannot be loaded: .*does not begin as an ELF"):
            preload(["libcufft.so.77"], index=places)
        assert preload(["libcufft.so.77", "libcudnn.so.77"], index=places, optional=True) == ()

    def test_a_missing_dependency_is_named(self, tmp_path: Path) -> None:
        inner = build(tmp_path, "libcublasLt.so.77")
        build(tmp_path, "libcublas.so.77", inner)
        inner.unlink()
        with pytest.raises(EngineError, match=r"libcublas\.so\.77 cannot be loaded: .*libcublasLt\.so\.77 cannot be"):
            preload(["libcublas.so.77"], index=index((tmp_path, "wheel")))


class TestLoaded:
    MAPS = """\
7f0000000000-7f0000001000 r--p 00000000 fe:00 1   /opt/env/site-packages/nvidia/cudnn/lib/libcudnn.so.9
7f0000001000-7f0000002000 r-xp 00000000 fe:00 1   /opt/env/site-packages/nvidia/cudnn/lib/libcudnn.so.9
7f0000003000-7f0000004000 r--p 00000000 fe:00 2   /usr/lib/libcublasLt.so.13.0.2.14
7f0000005000-7f0000006000 r--p 00000000 fe:00 3   /usr/lib/libcurl.so.4
7f0000007000-7f0000008000 r--p 00000000 fe:00 4   /tmp/old name/libcudart.so.13.0.1 (deleted)
7f0000009000-7f000000a000 r--p 00000000 fe:00 5   /opt/env/site-packages/msgspec/_core.cpython-311-x86_64-linux-gnu.so
7f000000b000-7f000000c000 r--p 00000000 fe:00 6   /opt/site-packages/xpuruntime/_core.cpython-311-x86_64-linux-gnu.so
7ffd00000000-7ffd00001000 rw-p 00000000 00:00 0   [stack]
7ffd00002000-7ffd00003000 rw-p 00000000 00:00 0
"""

    def test_vendor_libraries_are_listed_once_with_versions(self) -> None:
        versions = {lib.name: (lib.version, lib.origin) for lib in loaded_libraries(maps=self.MAPS)}
        assert versions == {
            "_core.cpython-311-x86_64-linux-gnu.so": (None, "package"),
            "libcublasLt.so.13.0.2.14": ("13.0.2.14", "system"),
            "libcudart.so.13.0.1": ("13.0.1", "system"),
            "libcudnn.so.9": ("9", "package"),
        }

    def test_the_driver_in_a_folder_called_nvidia_is_no_wheel(self) -> None:
        maps = "7f0000000000-7f0000001000 r--p 0 fe:00 1 /usr/local/nvidia/lib64/libcuda.so.580.159.04\n"
        [driver] = loaded_libraries(maps=maps)
        assert (driver.version, driver.origin) == ("580.159.04", "system")
