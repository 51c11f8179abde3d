# SPDX-License-Identifier: GPL-2.0-or-later
# Completion of agentgate for bash. Each command's options are in one line of _agentgate_options;
# scripts/docs-check compares them with the program's own --help.

_agentgate_options() {
  case $1 in
    '') echo "--json --socket --timeout --help" ;;
    arm) echo "--policy --help" ;;
    run) echo "--policy --wait-ready --help" ;;
    disarm) echo "--help" ;;
    check) echo "--help" ;;
    refresh) echo "--policy --all --help" ;;
    status) echo "--help" ;;
    health) echo "--help" ;;
    doctor) echo "--help" ;;
    version) echo "--help" ;;
    policy) echo "--help" ;;
    policy\ check) echo "--help" ;;
    policy\ list) echo "--policy-directory --help" ;;
  esac
}

_agentgate_commands() {
  case $1 in
    '') echo "run arm disarm check refresh status health doctor version policy" ;;
    policy) echo "check list" ;;
  esac
}

_agentgate() {
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} command='' word i
  for ((i = 1; i < COMP_CWORD; ++i)); do
    word=${COMP_WORDS[i]}
    case $word in
      --socket | --timeout | --policy | --policy-directory | --wait-ready) ((++i)) ;;
      -*) ;;
      *) [[ " $(_agentgate_commands "$command") " == *" $word "* ]] && command="${command:+$command }$word" ;;
    esac
  done
  COMPREPLY=()
  case $previous in
    --socket) mapfile -t COMPREPLY < <(compgen -f -- "$current"); return ;;
    --policy-directory) mapfile -t COMPREPLY < <(compgen -d -- "$current"); return ;;
    --timeout | --wait-ready) return ;;
    --policy)
      mapfile -t COMPREPLY < <(compgen -W "$(agentgate policy list 2>/dev/null | cut -d' ' -f1)" -- "$current")
      return
      ;;
  esac
  if [[ $current == -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$(_agentgate_options "$command") $(_agentgate_options '')" -- "$current")
    return
  fi
  case $command in
    arm | disarm | check)
      mapfile -t COMPREPLY < <(compgen -W "$(docker ps --format '{{.Names}}' 2>/dev/null)" -- "$current")
      ;;
    'policy check') mapfile -t COMPREPLY < <(compgen -f -- "$current") ;;
    *) mapfile -t COMPREPLY < <(compgen -W "$(_agentgate_commands "$command")" -- "$current") ;;
  esac
}

complete -o filenames -F _agentgate agentgate
