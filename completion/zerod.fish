# SPDX-License-Identifier: Apache-2.0
#
# Completion in fish of the program that this file is named after: zerod, zerodrun or zerodctl. Commands and options are
# read from its --help.

set -l program (string replace --regex '.*/(\w+)\.fish$' '$1' -- (status filename))
set -l command

for line in (command $program --help 2>/dev/null)
    # "  -n, --ranks N    ranks on this node": an option's short form, its name, whether it has a value, the rest.
    set -l option (string match --regex '^ *((?:-\w, )?)--([a-z][a-z-]*)((?: \[?[A-Z])?)(.*)' -- $line)
    # "  checkpoint save [--no-wait]  write a checkpoint": a command, its second word, the rest.
    set -l begun (string match --regex '^  ([a-z][a-z-]*)((?: [a-z][a-z-]*)?)(.*)' -- $line)
    set -l text (string match --regex --groups-only '^.*?\S  +(\S.*)' -- $line)
    if test (count $option) -gt 0
        set command
        set -l how --long-option $option[3]
        test -z "$option[2]"; or set -a how --short-option (string sub --start 2 --length 1 -- $option[2])
        test -z "$option[4]"; or set -a how --require-parameter
        switch $option[3]
            case config
                set -a how --arguments '(__fish_complete_suffix .yaml)'
            case color
                set -a how --no-files --arguments 'auto always never'
        end
        complete --command $program --description "$text" $how
        continue
    else if test (count $begun) -gt 0
        set command $begun[2]
        set -l second (string trim -- $begun[3])
        if test -z "$second"
            complete --command $program --condition __fish_use_subcommand --no-files --arguments $command --description "$text"
        else
            complete --command $program --condition __fish_use_subcommand --no-files --arguments $command
            complete --command $program --condition "__fish_seen_subcommand_from $command" --arguments $second --description "$text"
        end
    end
    if test -n "$command"
        for own in (string match --all --regex --groups-only -- '--([a-z][a-z-]*)' $line)
            complete --command $program --condition "__fish_seen_subcommand_from $command" --long-option $own
        end
    end
end
