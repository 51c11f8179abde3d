// SPDX-License-Identifier: GPL-2.0-or-later
//
// Answers of the engine: any bytes give a value or an error, and no container without an id. Its
// stream of events gives the same ones however it is cut, up to the first error.
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "plugin/engine/engine.h"
#include "plugin/engine/stream.h"

namespace {

using namespace agentgate::engine;

std::vector<Event> events_of(std::string_view text, std::size_t step) {
  std::vector<Event> out;
  EventStream stream;
  while (!text.empty()) {
    const auto part = text.substr(0, step);
    text.remove_prefix(part.size());
    if (!stream.feed(part, [&](const Event& event) { out.push_back(event); })) break;
  }
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto container = container_from_json(text);
  if (container && container->id.empty()) std::abort();
  if (!container && container.error().text.empty()) std::abort();
  (void)info_from_json(text);
  (void)runtimes_from_daemon_json(text);
  (void)dns_from_daemon_json(text);
  (void)endpoints_from_json(text);
  const auto event = event_from_json(text);
  if (event && (event->type.empty() || event->action.empty())) std::abort();
  if (event && event->type == "container" && event->container.empty()) std::abort();
  const auto events = events_of(text, size + 1);
  if (events_of(text, 1) != events || events_of(text, 7) != events) std::abort();
  return 0;
}
