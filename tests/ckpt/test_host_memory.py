"""How much memory there is: by the machine, and by every cgroup above this process."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from keepstep.ckpt.host_memory import available_bytes, limit_left_bytes

GB = 1 << 30


def write_limit(directory: Path, names: tuple[str, str, str], numbers: tuple[object, ...]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    limit, usage, cache = names
    (directory / limit).write_text(f"{numbers[0]}\n")
    (directory / usage).write_text(f"{numbers[1]}\n")
    (directory / "memory.stat").write_text(f"anon 5\n{cache} {numbers[2]}\n")


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "cgroup"
    path.write_text("0::/pod/box\n")
    return path


def test_without_cgroups_it_is_what_the_kernel_says(tmp_path: Path) -> None:
    found = available_bytes(tmp_path, tmp_path / "none")
    assert abs(found - psutil.virtual_memory().available) < 2 * GB


def test_on_this_machine_it_is_some(tmp_path: Path) -> None:
    assert 0 < available_bytes() <= psutil.virtual_memory().total


def test_a_limit_less_what_is_used_and_cannot_be_dropped(tmp_path: Path, own: Path) -> None:
    write_limit(tmp_path / "pod" / "box", V2, (1 << 28, 3 << 26, 1 << 20))
    assert available_bytes(tmp_path, own) == (1 << 28) - (3 << 26) + (1 << 20)


def test_the_tightest_limit_above_counts(tmp_path: Path, own: Path) -> None:
    write_limit(tmp_path / "pod" / "box", V2, ("max", 0, 0))
    write_limit(tmp_path / "pod", V2, (1 << 27, 1 << 26, 0))
    write_limit(tmp_path, V2, (1 << 28, 0, 0))
    assert available_bytes(tmp_path, own) == 1 << 26


def test_limits_of_the_older_kind_are_read(tmp_path: Path, own: Path) -> None:
    own.write_text("5:cpu:/\n4:memory:/pod\n0::/\n")
    write_limit(tmp_path / "memory" / "pod", V1, (1 << 28, 1 << 27, 4096))
    assert available_bytes(tmp_path, own) == (1 << 27) + 4096


def test_more_used_than_allowed_is_less_than_nothing(tmp_path: Path, own: Path) -> None:
    write_limit(tmp_path / "pod" / "box", V2, (1 << 28, 1 << 29, 0))
    assert available_bytes(tmp_path, own) < 0


def test_the_greatest_number_of_version_1_is_no_limit(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("4:memory:/box\n")
    write_limit(tmp_path / "memory" / "box", V1, ((1 << 63) - 4096, GB, 0))
    assert limit_left_bytes(tmp_path, own) is None
