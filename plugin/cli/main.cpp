// SPDX-License-Identifier: GPL-2.0-or-later
#include <iostream>

#include "plugin/cli/cli.h"

int main(int argc, char** argv) { return agentgate::cli::run(argc, argv, std::cout, std::cerr); }
