"""The variational autoencoder learns."""

import pytest

# Run with the slow ones: each of these programs takes seconds to compile.
pytestmark = pytest.mark.slow

pytest.importorskip("sklearn", reason="examples/vae.py reads scikit-learn's digits")
pytest.importorskip("tqdm", reason="examples/vae.py shows tqdm's progress bar")


@pytest.mark.usefixtures("optimized")
def test_it_learns(program, capsys):
    """More than the pixels alone, in ten epochs."""
    found = program.main(["--epochs", "10", "--draws", "10"])

    printed = capsys.readouterr().out
    assert f"bound {found.elbo:.1f} nats per digit, {found.many:.1f} by many draws\n" in printed
    alone = float(printed.split("pixels by themselves: ")[1].split()[0])
    assert alone + 50 < found.elbo < found.many < 0
