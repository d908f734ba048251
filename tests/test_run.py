"""The order of a calibration's launches on one rank, with a launcher that only takes notes.

Not covered: torch, GPUs and meetings of ranks (tests/gpu).
"""

from pathlib import Path

import pytest

from xstage.calibration.protocol import Point
from xstage.calibration.run import _measure
from xstage.samples import Sample, read


class Notes:
    def __init__(self) -> None:
        self.launched: list[Point] = []

    def launch(self, point: Point) -> Sample:
        self.launched.append(point)
        return Sample(point.method, point.mode, point.destination, point.producers, point.bytes_per_producer, float(len(self.launched)), 0)


def test_a_change_of_destination_is_followed_by_an_unrecorded_launch(tmp_path: Path) -> None:
    peer = [Point("st_global", "free", k, 1024) for k in (1, 2, 3)]
    local = [Point("st_global", "free", k, 1024, destination="local") for k in (4, 5)]
    notes, log = Notes(), tmp_path / "samples.jsonl"
    _measure(notes, [*peer, *local, peer[0]], log)
    assert [p.producers for p in notes.launched] == [1, 1, 2, 3, 4, 4, 5, 1, 1]
    # The second of two equal launches is the one that counts.
    assert [(s.producers, s.gap_ns) for s in read(log)] == [(1, 2.0), (2, 3.0), (3, 4.0), (4, 6.0), (5, 7.0), (1, 9.0)]


def test_samples_reach_the_disk_before_the_last_launch(tmp_path: Path) -> None:
    log = tmp_path / "samples.jsonl"

    class Dies(Notes):
        def launch(self, point: Point) -> Sample:
            if len(self.launched) == 70:
                raise RuntimeError("the machine is gone")
            return super().launch(point)

    with pytest.raises(RuntimeError):
        _measure(Dies(), [Point("bulk", "free", 8, 1024)] * 100, log)
    assert len(list(read(log))) == 69  # 70 launches, the first of them unrecorded
