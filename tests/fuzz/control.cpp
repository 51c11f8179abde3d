// SPDX-License-Identifier: GPL-2.0-or-later
//
// Requests to the control API, and the command line's view of what a daemon might answer.
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>

#include "plugin/cli/render.h"
#include "plugin/control/codec.h"
#include "plugin/model.h"

namespace {

void require(bool sound) {
  if (!sound) std::abort();
}

// What goes to a terminal has nothing in it that steers one.
void require_printable(const std::string& text) {
  for (const char c : text) require(static_cast<unsigned char>(c) >= 0x20 || c == '\n');
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace agentgate;
  const std::string text(reinterpret_cast<const char*>(data), size);
  const auto check = [](const std::string& container) {
    require(!container.empty() && container.size() <= 255);
    require(container.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                        "0123456789_.-") == std::string::npos);
  };
  if (const auto arm = control::decode_arm(text)) {
    check(arm->container);
    if (arm->policy) require(check_policy_name(*arm->policy).has_value());
  } else {
    require(!arm.error().field.empty() && !arm.error().text.empty());
    require(!control::encode_error(arm.error()).empty());
  }
  if (const auto wanted = control::decode_precheck(text)) {
    check(wanted->container);
    if (wanted->network) require(NetworkId::parse(*wanted->network).has_value());
  }
  if (const auto container = control::decode_container(text)) check(*container);
  (void)control::decode_refresh(text);

  const auto answer = nlohmann::json::parse(text, nullptr, false);
  if (!answer.is_discarded()) {
    require_printable(cli::render_report(answer));
    require_printable(cli::render_refresh(answer));
    require_printable(cli::render_status(answer));
    require_printable(cli::render_health(answer));
    require_printable(cli::render_doctor(answer));
  }
  return 0;
}
