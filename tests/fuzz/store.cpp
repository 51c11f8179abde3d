// SPDX-License-Identifier: GPL-2.0-or-later
//
// State files: whatever decodes, encodes to something that decodes to the same.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "plugin/store/store.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace agentgate::store;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (const auto network = decode_network(text)) {
    const auto again = decode_network(encode(*network));
    if (!again || *again != *network) std::abort();
  }
  if (const auto endpoint = decode_endpoint(text)) {
    const auto again = decode_endpoint(encode(*endpoint));
    if (!again || *again != *endpoint) std::abort();
  }
  if (const auto policy = decode_policy(text)) {
    const auto again = decode_policy(encode(*policy));
    if (!again || *again != *policy) std::abort();
  }
  return 0;
}
