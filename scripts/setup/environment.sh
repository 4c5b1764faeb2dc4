# Sourced by the other scripts: variables that must be set before torch and jax are loaded. What is set already stays.

# What torch.compile generated is found again by the next run.
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$repo/.cache/inductor}

# On Linux torch.compile looks for g++ by that name; any other compiler it must be told of.
if [ -z "${CXX:-}" ] && [ "$(uname -s)" != Darwin ] && ! command -v g++ >/dev/null 2>&1; then
    for name in c++ clang++; do
        if command -v "$name" >/dev/null 2>&1; then
            export CXX=$name
            break
        fi
    done
fi
