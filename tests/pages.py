"""The pages of the documentation as programs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def section(page: str, heading: str) -> str:
    """The text of a page below a heading, up to the next one of the same level or a higher one."""
    text = (DOCS / page).read_text()
    marks = re.match("#+", heading)
    assert marks is not None
    (found,) = re.findall(rf"^{re.escape(heading)}$(.*?)(?=^#{{1,{len(marks.group())}}} |\Z)", text, re.DOTALL | re.MULTILINE)
    return str(found)


def blocks(text: str, language: str) -> list[str]:
    """The contents of the code blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def run(program: str, folder: Path, **variables: str) -> str:
    """Run a Python program in ``folder``, with no settings of the caller's; return what it prints."""
    (folder / "program.py").write_text(program)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    environment |= {"FOREBAY_MIN_FREE": "0", "FOREBAY_HOME": str(folder / "home"), **variables}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    command = [sys.executable, "-X", "faulthandler", "program.py"]
    output, complaints = folder / "output.txt", folder / "complaints.txt"  # no pipes: what the program leaves running may keep them open
    with open(output, "w") as out, open(complaints, "w") as err:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=err)
        try:
            code = process.wait(270)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # it says where its threads are
            code = process.wait(30)
        finally:
            process.kill()
    assert code == 0, output.read_text() + complaints.read_text()
    return output.read_text()
