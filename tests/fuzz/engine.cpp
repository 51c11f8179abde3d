// SPDX-License-Identifier: GPL-2.0-or-later
//
// Answers of the engine: any bytes give a value or an error, and no container without an id.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "plugin/engine/engine.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace agentgate::engine;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto container = container_from_json(text);
  if (container && container->id.empty()) std::abort();
  if (!container && container.error().text.empty()) std::abort();
  (void)info_from_json(text);
  (void)endpoints_from_json(text);
  return 0;
}
