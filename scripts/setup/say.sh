# Sourced by the scripts that print for a person: `say TEXT` prints `lockstep: TEXT` on stdout.
#
# On a terminal the line is broken between words; in a file or a pipe it stays one line.

say() {
    local size
    if [ -t 1 ] && command -v fold >/dev/null 2>&1; then
        { size=$(stty size 2>/dev/null <&9) || size='24 80'; } 9>&1
        [ "${size#* }" -gt 0 ] || size='24 80'
        printf 'lockstep: %s\n' "$*" | fold -s -w "${size#* }"
    else
        printf 'lockstep: %s\n' "$*"
    fi
}
