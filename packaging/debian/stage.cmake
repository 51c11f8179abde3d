# SPDX-License-Identifier: GPL-2.0-or-later
# Run by CPack: the package's files, in the form that Debian wants them.
set(stage "${CPACK_TEMPORARY_INSTALL_DIRECTORY}")
if(NOT stage MATCHES "/_CPack_Packages/")
  message(FATAL_ERROR "this is for CPack")
endif()
foreach(component programs debian)
  execute_process(COMMAND ${CMAKE_COMMAND} -E env "DESTDIR=${stage}"
                          ${CMAKE_COMMAND} --install ${CPACK_AGENTGATE_BINARY_DIR} --prefix /usr --strip
                          --component ${component}
                  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
endforeach()
file(GLOB programs ${stage}/usr/bin/* ${stage}/usr/sbin/*)
execute_process(COMMAND strip --remove-section=.comment --remove-section=.note ${programs}
                COMMAND_ERROR_IS_FATAL ANY)
file(GLOB texts ${stage}/usr/share/man/man*/* ${stage}/usr/share/doc/agentgate/changelog*)
execute_process(COMMAND gzip -9n ${texts} COMMAND_ERROR_IS_FATAL ANY)
# Docker's command line finds its plugins there, by name.
file(MAKE_DIRECTORY ${stage}/usr/libexec/docker/cli-plugins)
file(CREATE_LINK ../../../bin/agentgate ${stage}/usr/libexec/docker/cli-plugins/docker-agentgate SYMBOLIC)
# Whatever the umask is.
execute_process(COMMAND find ${stage} -type d -exec chmod 755 {} + COMMAND_ERROR_IS_FATAL ANY)
