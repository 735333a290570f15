# Sourced by the example scripts: `$PYTHON`, the interpreter, and the functions `installed` and `experiment`.
# The interpreter is $PYTHON if it is set, else that of the clone's .venv (`make runtime`), else python3.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${PYTHON:-} && -x $root/.venv/bin/python ]]; then
    PYTHON=$root/.venv/bin/python
    # Some scripts need megatron-core, an extra that is installed once. A smoke run installs nothing: it names the
    # command that installs it.
    if [[ ${RLOOM_SMOKE:-} != 1 ]] && grep -q 'strategy=megatron' "${BASH_SOURCE[1]}"; then
        make --directory "$root" --no-print-directory --silent megatron
    fi
fi
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    if ! python3 -c 'import rloom, hydra' 2> /dev/null; then
        echo "python3 has no rloom; install it with \`make runtime\` in $root, or name its interpreter: PYTHON=..." >&2
        exit 1
    fi
fi

# installed MODULE: whether the interpreter has it.
installed() {
    "$PYTHON" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)" > /dev/null
}

# experiment MODEL SUFFIX ARGUMENTS...: the name MODEL_SUFFIX. If the arguments name another model, MODEL is replaced by
# its name, so that its run has a directory of its own.
experiment() {
    local model=$1 suffix=$2 argument
    for argument in "${@:3}"; do
        if [[ ${argument#++} == actor_rollout_ref.model.path=* ]]; then
            model=$(basename "${argument#*=}" | tr -d "'\"")
        fi
    done
    echo "${model}_$suffix"
}
