# SPDX-License-Identifier: Apache-2.0
#
# Completion of zerod, zerodrun and zerodctl in bash. Commands and options are read from the program's own --help, so this
# file has no list of them. If nothing is offered, readline completes file names.

# _zerod_files TEST SUFFIX...: offers folders, and files that pass TEST (-f, -S) and have one of the suffixes.
_zerod_files() {
    local kind=$1 name path suffix
    shift
    compopt -o filenames 2>/dev/null
    while read -r name; do
        path=${name/#\~\//$HOME/}
        [ ! -d "$path" ] || COMPREPLY+=("$name")
        [ "$kind" "$path" ] || continue
        for suffix in "$@"; do
            [[ $name != *"$suffix" ]] || COMPREPLY+=("$name")
        done
    done < <(compgen -f -- "$word")
}

# Offers the sockets of services and ZEROD_SOCKET; if none of them fits, those at the path that was begun.
_zerod_sockets() {
    local socket
    for socket in /run/zerod/*.sock ${ZEROD_SOCKET+"$ZEROD_SOCKET"}; do
        [[ ! -S $socket || $socket != "$word"* ]] || COMPREPLY+=("$socket")
    done
    [ ${#COMPREPLY[@]} -gt 0 ] || _zerod_files -S ''
}

# _zerod_value OPTION: offers values. Return: whether the option has one.
_zerod_value() {
    local has_value="(^|[^[:alnum:]-])$1(, --[a-z-]+)?[ =]\[?[A-Z]"
    case $1 in
    --socket) _zerod_sockets ;;
    --config | -c) _zerod_files -f .yaml .yml .json ;;
    --color) mapfile -t COMPREPLY < <(compgen -W 'auto always never' -- "$word") ;;
    --stage) mapfile -t COMPREPLY < <(compgen -W '1 2 3' -- "$word") ;;
    --dtype | --grad-dtype) mapfile -t COMPREPLY < <(compgen -W 'fp32 bf16 fp16' -- "$word") ;;
    -*) [[ $help =~ $has_value ]] ;;
    *) return 1 ;;
    esac
}

# Adds to commands the words before the cursor that are neither an option nor its value. Return: 1 behind "--".
_zerod_words() {
    local i at
    for ((i = 1; i < COMP_CWORD; i++)); do
        at=${COMP_WORDS[i]}
        case $at in
        --)
            program_at=$((i + 1))
            return 1
            ;;
        -*)
            if [ "${COMP_WORDS[i + 1]}" = = ]; then
                ((i += 2))
            elif word='' _zerod_value "$at"; then
                ((i += 1))
            fi
            COMPREPLY=()
            ;;
        *) commands+="$at " ;;
        esac
    done
}

# Offers what the lines of --help have behind the words that are there: options if one was begun, else commands.
_zerod_lines() {
    local line own='' next='' options=''
    while IFS= read -r line; do
        [[ ! $line =~ ^'  '[a-z] ]] || own=
        if [[ $line =~ ^\ *(-[A-Za-z],\ )?(--[a-z][a-z-]*) ]]; then # of all commands
            own='' options+=" ${BASH_REMATCH[1]%, } ${BASH_REMATCH[2]}"
        elif [[ "$line " == "  $commands"* ]]; then
            own=1
            [[ ! ${line:2+${#commands}} =~ ^([a-z][a-z-]*)(\ |$) ]] || next+=" ${BASH_REMATCH[1]}"
        fi
        while [[ $own && -n $commands && $line =~ (--[a-z][a-z-]*)(.*) ]]; do # of this command
            options+=" ${BASH_REMATCH[1]}"
            line=${BASH_REMATCH[2]}
        done
    done <<<"$help"
    [[ $word != -* ]] || next=$options
    mapfile -t COMPREPLY < <(compgen -W "$next" -- "$word" | sort -u)
}

# Completes the program that zerodrun starts, as if it stood alone.
_zerod_program() {
    if declare -F _command_offset >/dev/null; then
        _command_offset "$program_at"
    elif [ "$COMP_CWORD" = "$program_at" ]; then
        mapfile -t COMPREPLY < <(compgen -c -- "$word")
    fi
}

_zerod() {
    local word=$2 before=$3 commands='' program_at help
    help=$("${1/#\~\//$HOME/}" --help 2>/dev/null)
    COMPREPLY=()
    if [ "${COMP_WORDS[COMP_CWORD]}" = = ]; then
        word='' before=${COMP_WORDS[COMP_CWORD - 1]}
    elif [ "$before" = = ]; then
        before=${COMP_WORDS[COMP_CWORD - 2]}
    fi
    if ! _zerod_words; then
        _zerod_program
    elif ! _zerod_value "$before"; then
        _zerod_lines
    fi
}

complete -o default -F _zerod zerod zerodrun zerodctl
