"""What CI and a developer run: `nox -s <session> -- <arguments for what the session runs>`."""

from pathlib import Path

import nox
from packaging.requirements import Requirement

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["tests"]
nox.options.reuse_venv = "yes"

PYPROJECT = nox.project.load_toml("pyproject.toml")
# One torch in every session: timings compare, and a new release cannot turn CI red.
TORCH = "torch==2.13.0"


def group(name: str) -> tuple[str, ...]:
    """Returns a dependency group of pyproject.toml."""
    return nox.project.dependency_groups(PYPROJECT, name)


def install(session: nox.Session, *requirements: str, constraints: tuple[str, ...]) -> None:
    """Installs the package, editable, and the requirements, each no other than a constraint allows."""
    # A file, since pip takes constraints no other way; torch in the same resolution, so that no other one is fetched.
    path = Path(session.virtualenv.location, "constraints.txt")
    path.write_text("\n".join([TORCH, *constraints]) + "\n")
    session.install("-c", str(path), "-e", ".", *requirements)


def lowest(requirement: Requirement) -> str:
    """Returns the requirement pinned at its lower bound, which it must have."""
    (bound,) = [specifier.version for specifier in requirement.specifier if specifier.operator == ">="]
    return f"{requirement.name}=={bound}"


@nox.session
def demo(session: nox.Session) -> None:
    """Trains and records a small network: examples/digits.py."""
    install(session, *group("demo"), constraints=group("pins"))
    session.run("python", "examples/digits.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Runs everything CI asks for: ruff, mypy, doctests, README and tests; arguments go to the tests."""
    install(session, *group("test"), *group("loggers"), *group("check"), constraints=group("pins"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")
    doctests = ["--doctest-modules", "--doctest-glob=README.md", "lightning_recorder", "README.md"]
    # It imports Triton, which is not everywhere.
    doctests.append("--ignore=lightning_recorder/reductions/triton_kernels.py")
    session.run("python", "-m", "pytest", *doctests)
    # In two processes, each of which computes with one thread; a file's tests stay together, as they share runs.
    parallel = ["-n", "2", "--dist", "loadfile"]
    session.run("python", "-m", "pytest", *parallel, *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def bench(session: nox.Session) -> None:
    """Measures what recording costs, beside other packages: python -m tests.benchmarks."""
    install(session, *group("test"), *group("bench"), constraints=group("pins"))
    session.run("python", "-m", "tests.benchmarks", *session.posargs)


@nox.session
def bench_capture(session: nox.Session) -> None:
    """Measures what recording a graph costs, beside other packages: python -m tests.benchmarks.capture."""
    install(session, *group("test"), *group("bench"), constraints=group("pins"))
    session.run("python", "-m", "tests.benchmarks.capture", *session.posargs)


@nox.session
def bench_writing(session: nox.Session) -> None:
    """Measures what writing records and dumps costs: python -m tests.benchmarks.writing."""
    install(session, *group("test"), constraints=group("pins"))
    session.run("python", "-m", "tests.benchmarks.writing", *session.posargs)


@nox.session
def pictures(session: nox.Session) -> None:
    """Makes the pictures of the README from a run of the demo; needs a Chromium."""
    install(session, *group("test"), constraints=group("pins"))
    session.run("python", "-m", "tests.browser.pictures", *session.posargs)


@nox.session
def minimums(session: nox.Session) -> None:
    """Runs the quick tests with every dependency but torch at the lower bound pyproject.toml gives it."""
    requirements = [Requirement(text) for text in PYPROJECT["project"]["dependencies"]]
    bounds = tuple(lowest(requirement) for requirement in requirements if requirement.name != "torch")
    # The viewer of TensorBoard before 2.21 wants pkg_resources, which setuptools 82 has given up.
    install(session, *group("test"), "setuptools<82", constraints=bounds)
    # An old release warns of what newer ones of its own dependencies deprecate.
    quiet = ["-W", "default::DeprecationWarning", "-W", "default::FutureWarning"]
    # They read back what libraries write which want newer dependencies.
    without = [f"--ignore=tests/sinks/test_{name}.py" for name in ("comet", "contract", "loggers", "mlflow", "wandb")]
    session.run("python", "-m", "pytest", "-m", "not slow and not browser", *quiet, *without, *session.posargs)
