"""The report: what is in it, what it escapes, and how a real browser shows it."""

from __future__ import annotations

import html.parser
import math
import random
import re
import shutil
import struct
import subprocess
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from forebay import Cache
from forebay._engine.seeing import Failure, Fetch, Now
from forebay.claims import ClaimInfo
from forebay.cli import listing
from forebay.cli.listing import Cell, cells_of
from forebay.cli.report import HINT, Rect, Series, chart, gather, squarify, treemap
from forebay.cli.report import page as html_of
from forebay.reports import HistoryPoint
from forebay.testing import ScriptedServer

from .conftest import Run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOSTILE = "<script>document.title='hacked'</script>/\"'><img src=x onerror=alert(1)>/\x1b[31m&amp;"


# -- the treemap -------------------------------------------------------------------------------------------------------


def test_squares_fill_the_rectangle_and_have_their_areas() -> None:
    rng = random.Random(1)
    for count in (1, 2, 7, 24):
        sizes = sorted((rng.randint(1, 10**9) for _ in range(count)), reverse=True)
        rects = squarify(sizes, Rect(5.0, 7.0, 300.0, 200.0))
        for size, rect in zip(sizes, rects, strict=True):
            assert math.isclose(rect.width * rect.height, size / sum(sizes) * 60_000, rel_tol=1e-6)
            assert rect.x > 4.999
            assert rect.y > 6.999
            assert rect.x + rect.width < 305.001
            assert rect.y + rect.height < 207.001
        for one in range(count):
            for other in range(one):
                a, b = rects[one], rects[other]
                wide = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
                high = min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
                assert min(wide, high) < 1e-6, "they overlap"


def test_the_example_of_the_paper_has_its_layout() -> None:
    rects = squarify([6, 6, 4, 3, 2, 2, 1], Rect(0.0, 0.0, 6.0, 4.0))
    assert [(round(r.width, 2), round(r.height, 2)) for r in rects] == [
        (3.0, 2.0), (3.0, 2.0), (1.71, 2.33), (1.29, 2.33), (1.2, 1.67), (1.2, 1.67), (0.6, 1.67),
    ]  # fmt: skip


def test_nothing_and_no_room_are_drawn_too() -> None:
    assert squarify([], Rect(0.0, 0.0, 1.0, 1.0)) == []
    assert squarify([3, 2], Rect(0.0, 0.0, 0.0, 5.0)) == [Rect(0.0, 0.0, 0.0, 0.0)] * 2
    assert "<svg" in treemap([("empty", [Cell("a", 0, 3)])], 100, 100, "wide")


def test_cells_are_prefixes_that_together_are_all_entries() -> None:
    rng = random.Random(2)
    names = [f"https://host{rng.randrange(3)}/a{rng.randrange(5)}/b{rng.randrange(4)}/{n}" for n in range(1000)]
    entries = [(name, rng.randrange(1, 1000)) for name in [*names, "plain", "https://host0/top"]]
    cells = cells_of(iter(entries))
    assert 5 < len(cells) <= listing.MOST_CELLS
    assert sum(cell.bytes for cell in cells) == sum(size for _, size in entries)
    assert sum(cell.entries for cell in cells) == len(entries)
    assert [cell.bytes for cell in cells] == sorted((cell.bytes for cell in cells), reverse=True)
    assert all(cell.name == "" or cell.name.startswith("https://host") for cell in cells)


def test_a_million_prefixes_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MOST_NODES", 10)
    cells = cells_of((f"s3://bucket/{number}/x", 1) for number in range(1000))
    assert sum(cell.entries for cell in cells) == 1000


def test_a_chart_draws_steps_and_leaves_gaps() -> None:
    points = [HistoryPoint(0, 60, hits=1), HistoryPoint(60, 120), HistoryPoint(120, 180, hits=1, misses=1)]
    svg = chart("Hit rate", points, [("", lambda point: point.hit_rate)], lambda value: f"{value:.0%}", "none", top=1.0)
    line = re.search(r'class="line line0" d="([^"]*)"', svg)
    assert line is not None
    assert line[1].count("M") == 2
    assert "100%" in svg


def test_a_chart_without_data_is_a_sentence() -> None:
    def drawn(**counts: int) -> str:
        points = [HistoryPoint(0, 60, **counts), HistoryPoint(60, 120)]
        fallbacks: Series = ("", lambda point: point.fallbacks)
        rate: Series = ("", lambda point: point.hit_rate)
        return chart("F", points, [fallbacks], str, "None & none.") + chart("R", points, [rate], str, "No calls.", top=1.0)

    assert re.findall(r"<svg|None &amp; none|No calls", drawn()) == ["None &amp; none", "No calls"]
    assert re.findall(r"<svg|None &amp; none|No calls", drawn(misses=1)) == ["None &amp; none", "<svg"]  # a rate of 0% is one
    assert re.findall(r"<svg|None &amp; none|No calls", drawn(fallbacks=1)) == ["<svg", "<svg"]


@pytest.mark.parametrize("seconds", [90, 960, 86_400, 2 * 86_400, 7 * 86_400, 30 * 86_400])
def test_no_two_times_of_an_axis_are_the_same(seconds: int) -> None:
    svg = chart("", [HistoryPoint(0, seconds, hits=1)], [("", lambda point: point.hits)], str, "")
    times = re.findall(r'y="145"[^>]*>([^<]*)<', svg)
    assert len(times) >= 3
    assert len(set(times)) == len(times) - (seconds == 86_400)  # midnight and midnight
    highest = chart("", [HistoryPoint(0, 1, waits=1)], [("", lambda point: point.waits / 300)], str, "")
    assert "0.005" in highest  # small values reach above half of their axis


def test_a_name_without_room_has_the_number_of_its_row_and_each_is_whole_below() -> None:
    spaces = [("urls", [Cell("s3://b/" + "x" * 80, 10**9, 7), Cell("s3://b/small/", 10**7, 2), Cell("dot", 10**4, 1), Cell("none", 0, 1)]),
              ("other", [Cell("y/", 2 * 10**8, 1)])]  # fmt: skip
    svg = treemap(spaces, 380, 460, "narrow")
    labels = re.findall(r'class="name"[^>]*>([^<]*)<', svg)
    assert re.fullmatch("1 …x+", labels[0])
    assert "y/" in labels
    assert re.findall(r'class="tip"[^>]*><p>([^<]*)<', svg) == re.findall(r'tabindex="0" role="img" aria-label="([^"]*)"', svg) == [
        f"1. 1 GB in 7 entries of urls: s3://b/{'x' * 80}", "2. 10 MB in 2 entries of urls: s3://b/small/",
        "3. 10 kB in 1 entry of urls: dot", "5. 200 MB in 1 entry of other: y/",
    ]  # fmt: skip
    assert HINT in svg


# -- the page ----------------------------------------------------------------------------------------------------------


class Elements(html.parser.HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def filled(cache: Cache, server: ScriptedServer) -> Cache:
    cache.read(server.put("/data/train/a.bin", bytes(300_000)))
    cache.read(server.put("/data/eval/b.bin", bytes(100_000)))
    cache.put(HOSTILE, bytes(50_000))
    cache.space("features").put("x/1", b"value")
    return cache


def test_the_page_holds_the_facts_and_needs_nothing_else(run: Run, filled: Cache, server: ScriptedServer, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    ran = run("report", "--html", file)
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    page = Elements(file.read_text())
    assert {tag for tag, _ in page.elements} & {"script", "link", "img", "iframe", "object"} == set()
    assert [a for _, attributes in page.elements for a in attributes if a in ("src", "href", "onerror", "onload", "style")] == []
    host = server.url.removeprefix("http://")
    assert f"{host}/data/train/" in page.text
    assert "300 kB" in page.text
    assert "50 MB" in page.text
    assert "<script>document.title" in page.text  # as text
    assert "\x1b" not in page.text
    assert sum(tag == "g" and attributes.get("tabindex") == "0" for tag, attributes in page.elements) >= 6
    assert list(tmp_path.glob("*.part")) == []
    assert run("report", "--html", "-").out.startswith("<!DOCTYPE html>")


def test_json_and_a_terminal_have_the_same(run: Run, filled: Cache, home: Path) -> None:
    report = run("report", "--json").json
    assert report["path"] == str(home)
    assert report["stats"]["entries"] == 4
    assert report["now"]["fetches"] == []
    assert sum(cell["bytes"] for cells in report["prefixes"].values() for cell in cells) == 450_005
    ran = run("report")
    assert ran.code == 0
    assert "features" in ran.out
    assert "\x1b" not in ran.out
    assert run("report", "--json", "--html", "x").code == 2


def test_numbers_have_units_and_their_singular(filled: Cache) -> None:
    claim = ClaimInfo(0, "job", "", "anna", 1000, (24562,), 24562, 0.0, 1, ("/scratch",), (None,), False, 67_100_000, True, "train.py")
    text = Elements(html_of(replace(gather(filled), claims=[claim]))).text
    for part in ("1 entry", "4 entries", "1 process", "0 calls", "The 4 cells as a table", "B/s", "used, of a budget of 50 MB (1%)"):
        assert part in text, part
    assert re.findall(r"\b1 (?:entries|processes|calls|minutes|waits)", text) == []


def test_a_bar_shows_what_is_used_and_reserved_of_the_budget(filled: Cache) -> None:
    content = gather(filled)
    for used, reserved, widths, said in (
        (300, 100, ("40.00", "30.00"), "300 B used and 100 B reserved, of a budget of 1 kB (40%)"),
        (9000, 0, ("100.00", "100.00"), "(100%)"),
    ):  # fmt: skip
        text = html_of(replace(content, stats=replace(content.stats, bytes_used=used, bytes_reserved=reserved, budget=1000)))
        assert tuple(re.findall(r'class="bar\d" width="([\d.]+)"', text)) == widths
        assert said in text


def test_ranges_are_those_with_data(run: Run, filled: Cache) -> None:
    content, now = gather(filled), 1_790_000_000.0

    def history(count: int, seconds: int, *, idle: int = 0, end: float = now) -> list[HistoryPoint]:
        starts = [end - (count - number) * seconds for number in range(count)]
        return [HistoryPoint(start, start + seconds, hits=int(n >= idle)) for n, start in enumerate(starts)]

    def shown(minutes: list[HistoryPoint], hours: list[HistoryPoint]) -> tuple[list[str], str]:
        text = html_of(replace(content, time=now, minutes=minutes, hours=hours))
        return [re.sub(" until .*,", "", title) for title in re.findall("<h3[^>]*>([^<]*)<", text)], text

    titles, text = shown(history(20, 60, idle=4), history(1, 3600))
    assert titles == ["16 minutes by minutes"]
    assert "Charts by hours follow" in text
    assert "The last 16 minutes as a table" in text
    assert "Evictions and fallbacks: there were none." in text
    assert text.count('<svg class="chart"') == 1  # the hit rate: hits without bytes, waits or evictions
    assert shown(history(1440, 60), history(24, 3600))[0] == ["24 hours by minutes"]
    titles, text = shown(history(1440, 60), history(72, 3600, idle=2))
    assert titles == ["24 hours by minutes", "3 days by hours"]
    assert "The last 48 hours as a table" in text
    titles, text = shown([], history(1, 3600, end=now - 3 * 86_400))
    assert titles == ["60 minutes by hours"]
    assert "Nothing was counted in the last day." in text
    assert "The last 1 hour as a table" in text
    titles, text = shown(history(3, 60, idle=3), history(3, 3600, idle=3))
    assert titles == []
    assert "There is no history yet" in text


def test_an_empty_cache_and_a_missing_one(run: Run, cache: Cache, tmp_path: Path) -> None:
    assert "The cache is empty." in run("report", "--html", "-").out
    assert run("-C", tmp_path / "none", "report").code == 3
    ran = run("report", "--html", tmp_path / "none" / "x.html")
    assert (ran.code, "cannot be written" in ran.err) == (1, True)


def test_the_last_failures_are_named_without_secrets(run: Run, cache: Cache, server: ScriptedServer) -> None:
    with pytest.raises(OSError):
        cache.read(f"{server.url}/missing.bin?token=SECRET")
    page = run("report", "--html", "-").out
    assert "missing.bin" in page
    assert "404" in page
    assert "SECRET" not in page


# -- in a browser ------------------------------------------------------------------------------------------------------


def browse(file: Path, folder: Path, *options: str) -> bytes:
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run([*command, *options, file.as_uri()], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def size_and_corner(png: Path) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Width and height of a picture, and the colour of its first pixel."""
    data = png.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    chunks, at = b"", 8
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        chunks += data[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += length + 12
    return (width, height), tuple(zlib.decompress(chunks)[1:4])  # the first pixel is stored as it is, whatever the filter


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize(("dark", "width"), [(False, 1000), (True, 390)])
def test_a_browser_shows_the_page(run: Run, filled: Cache, tmp_path: Path, dark: bool, width: int) -> None:
    file, picture = tmp_path / "report.html", tmp_path / "report.png"
    run("report", "--html", file)
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    dom = browse(file, tmp_path, f"--window-size={width},800", f"--screenshot={picture}", "--dump-dom", *scheme).decode()
    assert "<title>Forebay: " in dom
    assert "hacked</title>" not in dom
    (shown_width, _), colour = size_and_corner(picture)
    assert shown_width == width
    assert (max(colour) < 64) == dark


LOOK = """<script>onload = () => {
  const boxes = [document.documentElement, ...document.querySelectorAll(".scroll")], named = []
  for (const one of document.querySelectorAll("details")) one.open = true
  for (const svg of document.querySelectorAll(".wide, .narrow")) {
    const visible = (one) => getComputedStyle(one).display != "none", cells = svg.querySelectorAll("g")
    if (!visible(svg)) continue
    const hint = svg.querySelector(".hint").getBoundingClientRect()
    for (const cell of cells) {
      cell.focus({preventScroll: true})
      const tips = [...svg.querySelectorAll(".tip")].filter(visible), text = tips[0].firstChild, room = text.getBoundingClientRect()
      const covers = room.top <= hint.top && room.bottom >= hint.bottom && getComputedStyle(text).backgroundColor != "rgba(0, 0, 0, 0)"
      named.push(tips.length == 1 && cell.contains(text) && covers && text.scrollHeight <= text.clientHeight)
    }
  }
  const wide = boxes.filter((one) => one.scrollWidth > one.clientWidth)
  parent.document.title = [innerWidth, wide.length, named.length, named.every((one) => one)]
}</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_focus_names_a_cell_and_nothing_scrolls_sideways(filled: Cache, tmp_path: Path, width: int) -> None:
    file, now = tmp_path / "report.html", 1_790_000_000.0
    points = [HistoryPoint(now - (9 - n) * 3600, now - (8 - n) * 3600, 10**7, bytes_hit=999 * 10**9, evictions=99_999) for n in range(9)]
    fetch = Fetch("urls", "s3://corpus/laion/shards-01/00611.tar", "process 24562 on node7 (train.py)", 61 * 10**6, 104 * 10**6, now)
    failure = Failure("urls", "https://weights.example/vit/h14.bin", now, "the server returned 404 Not Found")
    claim = ClaimInfo(
        0, "SLURM 4711.0", "", "anna", 1000, (1,), 1, 0.0, 1, ("/scratch/train",), (None,), False, 67_100_000, True, "train.py"
    )
    content = replace(gather(filled), minutes=points, hours=points, now=Now((fetch,), (), 1, (failure,)), claims=[claim])
    inner = html.escape(re.sub("<meta http-equiv[^>]*>", LOOK, html_of(content)))
    file.write_text(
        f'<title></title><iframe width="{width}" height="800" frameborder="0" srcdoc="{inner}"></iframe>'
    )  # no window is as narrow
    title = re.search("<title>([^<]*)", browse(file, tmp_path, "--dump-dom").decode())
    assert title is not None
    assert title[1] == f"{width},0,4,true"
