"""`python -m boundedkv check` and the pytest plugin: readable, and with a status that CI can go by."""

import json
import sys
from importlib.metadata import entry_points

import pytest

from boundedkv.cli import main
from boundedkv.reference import ReferenceManager

pytest_plugins = ["pytester"]

QUICK = ["--features", "batch", "--examples", "2"]
OURS = "boundedkv.reference:ReferenceManager"
# Where the package is installed its entry point has loaded the plugin already.
PLUGIN = [] if entry_points(group="pytest11", name="boundedkv") else ["-p", "boundedkv.testing.plugin"]


class Wrong(ReferenceManager):
    """Every result is a millionth too large."""

    def _attend_row(self, *arguments):
        return super()._attend_row(*arguments) * (1 + 2.0**-20)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("boundedkv.testing.hunt.SHRINKING_PATIENCE", 0.5)


def test_manager_that_conforms(capsys):
    assert main(["check", OURS, *QUICK]) == 0
    out = capsys.readouterr().out
    assert out.startswith("ReferenceManager conforms: every bit equal; ")
    assert "not covered: lookahead, ragged, " in out


def test_manager_that_does_not(capsys):
    assert main(["check", f"{__name__}:Wrong", *QUICK]) == 1
    out = capsys.readouterr().out
    assert out.startswith("Wrong does not conform: basics, batch, together; ")
    assert "attend: the result differs\nwhere        request 'a' (row 0 of the batch), query 0" in out
    assert "BoundedKVConfig(1, 1, " in out


def test_close_mode_lets_it_pass(capsys):
    assert main(["check", f"{__name__}:Wrong", *QUICK, "--numerics", "close"]) == 0
    assert "arithmetic within its limit" in capsys.readouterr().out


@pytest.mark.parametrize("missing", [False, True], ids=["rich", "plain"])
def test_report_with_and_without_rich(missing, capsys, monkeypatch):
    pytest.importorskip("rich")
    if missing:
        for name in ("rich", "rich.console", "rich.table"):
            monkeypatch.setitem(sys.modules, name, None)
    assert main(["check", OURS, *QUICK]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines if line[1:2] == ["conforms"]] == [
        [name, "conforms"] for name in ("basics", "batch", "lifecycle", "together")
    ]


def test_json_alone_on_standard_output(capsys):
    assert main(["check", f"{__name__}:Wrong", *QUICK, "--json", "-"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["conforms"] is False
    assert report["calls"] == sum(case["calls"] for case in report["cases"])
    assert report["features"]["batch"] > 0
    assert report["features"]["rows"] is None
    assert "the result differs" in report["cases"][0]["failure"]


def test_json_in_a_file_beside_the_report(tmp_path, capsys):
    assert main(["check", OURS, *QUICK, "--json", str(tmp_path / "report.json")]) == 0
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["conforms"] is True
    assert "conforms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["boundedkv.nowhere:F"], "MODULE:FACTORY is 'boundedkv.nowhere:F', but should name a callable"),
        (["boundedkv:Nobody"], "should name a callable"),
        (["boundedkv"], "MODULE:FACTORY is 'boundedkv', but should be a module, a colon, and a name in it"),
        ([":F"], "should be a module, a colon, and a name in it"),
        ([OURS, "--device", "tpu"], "device is 'tpu', but should be one that torch sees: "),
        (["boundedkv:PLAN_VERSION"], "a int, but should name a callable"),
        ([OURS, "--features", "sinks"], "no feature is called 'sinks'; known are batch, "),
        ([OURS, "--without", "sinks"], "no feature is called 'sinks'"),
        ([OURS, "--examples", "0"], "examples is 0, but should be"),
        ([OURS, "--operands", "tf32"], "operands is 'tf32', but should be None unless numerics is 'close'"),
        ([OURS, "--numerics", "close", "--operands", "int8"], "operands is 'int8', but should be one of"),
    ],
)
def test_wrong_usage(arguments, words, capsys):
    assert main(["check", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_report_that_could_not_be_written_is_refused_before_the_work(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["check", OURS, "--json", str(tmp_path / "none" / "report.json")])
    assert ended.value.code == 2
    assert "no folder" in capsys.readouterr().err


def test_first_only_stops_after_the_first_case_that_differs(capsys):
    assert main(["check", f"{__name__}:Wrong", *QUICK, "--first-only"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("Wrong does not conform: basics; ")
    assert "not run after the first difference: batch, lifecycle, together" in out


# The plugin.


def test_plugin_collects_a_test_for_each_case(pytester):
    done = pytester.runpytest(*PLUGIN, "--boundedkv-manager", OURS, "--boundedkv-features", "batch", "--collect-only")
    names = [line for line in done.outlines if "ConformanceItem" in line]
    assert len(names) > 25
    done.stdout.fnmatch_lines(["*<ConformanceItem basics>", "*<ConformanceItem batch>", "*<ConformanceItem rel_bias>"])


def test_plugin_passes_skips_and_fails(pytester):
    pytester.makepyfile(
        mine="""
        from boundedkv.reference import ReferenceManager

        class Wrong(ReferenceManager):
            def _attend_row(self, *arguments):
                return super()._attend_row(*arguments) * (1 + 2.0**-20)
        """,
        test_other="def test_other(): pass",
    )
    settings = ["--boundedkv-features", "batch", "--boundedkv-examples", "2", "-rs"]
    done = pytester.runpytest(*PLUGIN, "--boundedkv-manager", OURS, *settings)
    done.assert_outcomes(passed=5, skipped=27 + 1)
    done.stdout.fnmatch_lines(["*not covered: the manager is not said to support it"])
    done = pytester.runpytest(*PLUGIN, "--boundedkv-manager", "mine:Wrong", *settings)
    done.assert_outcomes(passed=2, failed=3, skipped=28)
    done.stdout.fnmatch_lines(["*call * of *, attend: the result differs", "where  *request 'a' (row 0 of the batch)*"])
    assert "hunt.py" not in done.stdout.str()
    close = pytester.runpytest(*PLUGIN, "--boundedkv-manager", "mine:Wrong", "--boundedkv-numerics=close", *settings)
    close.assert_outcomes(passed=5, skipped=28)


def test_plugin_refuses_wrong_usage(pytester):
    done = pytester.runpytest(*PLUGIN, "--boundedkv-manager", "nowhere:F")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*MODULE:FACTORY is 'nowhere:F', but should name a callable*"])


def test_plugin_is_inert_without_its_option(pytester):
    pytester.makepyfile(
        """
        import sys

        def test_nothing_is_imported():
            assert "boundedkv.testing.plugin" in sys.modules
            assert not {"torch", "hypothesis.stateful", "boundedkv.config"} & set(sys.modules)
        """
    )
    pytester.runpytest_subprocess(*PLUGIN, "-p", "no:hypothesispytest").assert_outcomes(passed=1)
