set shell := ["bash", "-euo", "pipefail", "-c"]
# every test worker and every command that a test starts would compile the sources again
export PYTHONDONTWRITEBYTECODE := ""

default:
    @just --list
# lint, types, layers; pyright and known holes in the installed packages, where pyright and pip-audit are installed
check:
    ruff check . && ruff format --check .
    mypy && lint-imports
    ! command -v pyright > /dev/null || pyright
    ! command -v pip-audit > /dev/null || pip-audit --skip-editable --progress-spinner off
# the main test suite, in parallel (tests wait now and then, so one worker more than processors); `-m slow` for the rest
[positional-arguments]
test *ARGS:
    pytest -n $(({{num_cpus()}} + 1)) --dist worksteal -m "not slow" "$@"

# install Ray, Trinity-RFT, and on GPUs vLLM and verl, in versions that agree: `just install-trinity --cpu`, `--cuda`
install-trinity *ARGS:
    python -m pip install -e .
    python -m ajet install trinity {{ARGS}}
# the real Trinity and Ray on a CPU; needs `just install-trinity --cpu`
test-trinity *ARGS:
    pytest tests/trinity {{ARGS}}
# the real verl on a CPU, as far as it needs no GPU; two steps of training where there is one
test-verl *ARGS:
    pytest tests/verl {{ARGS}}
# a real vLLM; needs `ajet install vllm`
test-vllm *ARGS:
    pytest tests/vllm {{ARGS}}
# the real SDK of the Tinker API against `ajet trainer serve`
test-tinker *ARGS:
    pytest tests/tinker {{ARGS}}
# a real Ray, of several nodes on this machine; needs `pip install -e ".[dev,ray]"`
test-ray *ARGS:
    pytest tests/sdk/test_ray_*.py {{ARGS}}
# agents of each framework's quick start in environments of their own; needs uv: `just test-frameworks langgraph --venvs DIR`
test-frameworks *ARGS:
    python -m tests.frameworks {{ARGS}}
# what only a GPU shows, in 15 minutes on one: `just test-gpu --json FILE`; `--dry` on a CPU, `--cluster` for vLLM, Trinity, verl
test-gpu *ARGS:
    python -m tests.gpu {{ARGS}}
# this repository and its light dependencies as wheels, for a GPU machine without a network: `just wheels FOLDER --python 3.12`
wheels *ARGS:
    python -m tests.gpu.wheels {{ARGS}}
# Python 3.10 to 3.14, lowest and newest dependencies, a quick part of the suite; needs uv: `just matrix 3.10 3.13`
matrix *ARGS:
    python -m tests.matrix {{ARGS}}
# the figures of the README; needs `pip install -e ".[bench]"` for the comparison with TRL
bench *ARGS:
    python -m tests.bench {{ARGS}}
# regenerate the reference, then build the site into build/site; needs `pip install -e ".[docs]"`
docs:
    python -m tests.reference docs/reference
    rm -rf build/pages build/site && mkdir -p build/pages
    git ls-files -co --exclude-standard ':(glob)*.md' docs tutorial | tar cf - -T - | tar xf - -C build/pages
    zensical build --strict --clean
# format in place
format:
    ruff check --fix .
    ruff format .
