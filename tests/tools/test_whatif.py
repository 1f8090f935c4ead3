"""`hetpass whatif`: changes of a cluster on the command line."""

from __future__ import annotations

import pytest


def test_more_devices_are_faster_and_priced(hetpass, saved):
    line = ("whatif", str(saved), "--add", "more=cpux4", "--price", "cpu=0.5",
            "--price", "cpu x0.5=0.1")  # fmt: skip
    said = hetpass(*line)
    assert said.code == 0, said.err
    assert "times as fast" in said.out
    data = hetpass(*line, "--json").data
    assert data["speedup"] > 1
    assert data["before"]["price_per_hour"] == pytest.approx(4 * 0.5 + 2 * 0.1)
    assert data["after"]["price_per_hour"] == pytest.approx(8 * 0.5 + 2 * 0.1)


def test_a_price_that_is_missing_is_named(hetpass, saved):
    said = hetpass("whatif", str(saved), "--add", "more=cpux4", "--price", "cpu=0.5")
    assert said.code == 0, said.err
    assert "--price cpu x0.5=AMOUNT" in said.out


def test_groups_and_links_change(hetpass, saved):
    line = (
        "whatif",
        str(saved),
        "--replace",
        "slow=H100-80x2x2",
        "--link",
        "fast:slow=1 ms,1 Gbps",
    )
    data = hetpass(*line, "--json").data
    groups = data["after"]["cluster"]["groups"]
    assert [(g["name"], g["kind"], g["hosts"]) for g in groups][1] == ("slow", "H100-80", 2)
    assert data["after"]["cluster"]["links"][0]["bandwidth"] == 1.25e8
    gone = hetpass("whatif", str(saved), "--remove", "slow", "--json").data
    assert len(gone["after"]["cluster"]["groups"]) == 1


@pytest.mark.parametrize(
    ("line", "code", "status"),
    [
        ((), "HP-TOOL-ARGUMENTS", 2),
        (("--add", "H100"), "HP-TOOL-ARGUMENTS", 2),
        (("--add", "new=H1000x2"), "HP-CLUSTER-KIND", 1),
        (("--remove", "none"), "HP-CLUSTER-GROUP", 1),
        (("--link", "fast:slow=soon,1 Gbps"), "HP-CLUSTER-UNIT", 1),
        (("--price", "cpu"), "HP-TOOL-ARGUMENTS", 2),
    ],
)
def test_what_cannot_be_read_is_refused(hetpass, saved, line, code, status):
    extra = ("--remove", "slow") if line[:1] == ("--price",) else ()
    said = hetpass("whatif", str(saved), *line, *extra)
    assert (said.code, code in said.err) == (status, True), said.err
