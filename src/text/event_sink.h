// Collects the events of one piece of an answer; neighbouring text of one kind becomes one event.
// Events of earlier pieces are never touched.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "text/output_parser.h"

namespace deepinfer {

class EventSink {
 public:
  explicit EventSink(std::vector<OutputEvent>* events) : events_(events), begin_(events->size()) {}

  void Reasoning(std::string_view text) {
    Text<ReasoningEvent>(text);
  }
  void Content(std::string_view text) {
    Text<ContentEvent>(text);
  }
  void Call(int64_t index, std::string name) {
    events_->push_back(ToolCallEvent{index, std::move(name)});
  }
  void Arguments(int64_t index, std::string_view text) {
    if (text.empty()) return;
    ArgumentsEvent* const last = Last<ArgumentsEvent>();
    if (last != nullptr && last->index == index) {
      last->text += text;
    } else {
      events_->push_back(ArgumentsEvent{index, std::string(text)});
    }
  }

 private:
  template <class Event>
  Event* Last() {
    return events_->size() > begin_ ? std::get_if<Event>(&events_->back()) : nullptr;
  }
  template <class Event>
  void Text(std::string_view text) {
    if (text.empty()) return;
    if (Event* const last = Last<Event>(); last != nullptr) {
      last->text += text;
    } else {
      events_->push_back(Event{std::string(text)});
    }
  }

  std::vector<OutputEvent>* events_;
  size_t begin_;
};

}  // namespace deepinfer
