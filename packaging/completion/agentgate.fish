# SPDX-License-Identifier: GPL-2.0-or-later
# Completion of agentgate for fish. One line for each command and option; scripts/docs-check compares
# them with the program's own --help.

function __agentgate_needs_command
    not __fish_seen_subcommand_from run arm disarm check refresh status health doctor version policy
end
function __agentgate_in_policy
    __fish_seen_subcommand_from policy; and not __fish_seen_subcommand_from check list
end
function __agentgate_containers
    docker ps --format '{{.Names}}' 2>/dev/null
end
function __agentgate_policies
    agentgate policy list 2>/dev/null | string replace -r ' .*' ''
end

complete -c agentgate -f
complete -c agentgate -l json -d 'Print answers as JSON'
complete -c agentgate -l socket -r -F -d "The daemon's control socket"
complete -c agentgate -l timeout -x -d 'Seconds to wait for an answer'
complete -c agentgate -l help -d 'Help'

complete -c agentgate -n __agentgate_needs_command -a run -d 'Create, start, pause, arm and unpause a container'
complete -c agentgate -n __agentgate_needs_command -a arm -d 'Verify paused containers and release them'
complete -c agentgate -n __agentgate_needs_command -a disarm -d 'Close containers again'
complete -c agentgate -n __agentgate_needs_command -a check -d 'Closed, released or inconsistent'
complete -c agentgate -n __agentgate_needs_command -a refresh -d 'Read policies and resolve their names again'
complete -c agentgate -n __agentgate_needs_command -a status -d 'Networks, endpoints and what happened'
complete -c agentgate -n __agentgate_needs_command -a health -d 'Whether the daemon is well'
complete -c agentgate -n __agentgate_needs_command -a doctor -d 'What kernel, engine and host lack'
complete -c agentgate -n __agentgate_needs_command -a version -d 'Versions of this program and the daemon'
complete -c agentgate -n __agentgate_needs_command -a policy -d 'Policy files'

complete -c agentgate -n '__fish_seen_subcommand_from arm' -l policy -x -a '(__agentgate_policies)' -d 'Policy'
complete -c agentgate -n '__fish_seen_subcommand_from run' -l policy -x -a '(__agentgate_policies)' -d 'Policy'
complete -c agentgate -n '__fish_seen_subcommand_from run' -l wait-ready -x -d 'How long to wait for daemon and container'
complete -c agentgate -n '__fish_seen_subcommand_from refresh' -l policy -x -a '(__agentgate_policies)' -d 'Only this policy'
complete -c agentgate -n '__fish_seen_subcommand_from refresh' -l all -d 'All policies in use'
complete -c agentgate -n '__fish_seen_subcommand_from arm disarm check; and not __fish_seen_subcommand_from policy' -a '(__agentgate_containers)'

complete -c agentgate -n __agentgate_in_policy -a check -d 'Validate policy files'
complete -c agentgate -n __agentgate_in_policy -a list -d 'The policies of a directory'
complete -c agentgate -n '__fish_seen_subcommand_from policy; and __fish_seen_subcommand_from list' -l policy-directory -x -a '(__fish_complete_directories)' -d 'Directory of policy files'
complete -c agentgate -n '__fish_seen_subcommand_from policy; and __fish_seen_subcommand_from check' -F
