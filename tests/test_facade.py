from __future__ import annotations

import subprocess
import sys

import headstart as hs


def test_public_names_are_few_and_load() -> None:
    assert len(hs.__all__) <= 18
    for name in hs.__all__:
        assert getattr(hs, name) is not None
    assert set(dir(hs)) == set(hs.__all__)


def test_an_unknown_name_lists_the_known() -> None:
    try:
        hs.generat  # noqa: B018
    except AttributeError as error:
        assert "generate" in str(error)
    else:
        raise AssertionError("no error")


def loaded_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_help_and_import_load_no_torch() -> None:
    helped = loaded_after(
        "from typer.testing import CliRunner\nfrom headstart.cli import app\n"
        "r = CliRunner().invoke(app, ['generate', '--help'])\nassert r.exit_code == 0, r.output"
    )
    assert "headstart.cli" in helped
    assert not {"torch", "transformers", "numpy"} & helped
    assert "torch" not in loaded_after("import headstart")
