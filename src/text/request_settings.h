// What the three protocols have in common beside messages: the model's name, thinking, sampling,
// stop strings, limits and the constraint.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "text/request_content.h"
#include "text/request_fields.h"
#include "text/request_tools.h"

namespace deepinfer {

void ReadModel(const JsonValue& body, const ConversionOptions& options, RequestReader* reader,
               ConvertedRequest* request);

// {"thinking": {"type": "enabled", "adaptive" or "disabled"}}.
std::optional<bool> ReadThinkingSwitch(const JsonValue& body, RequestReader* reader);
// A name of ReasoningEffortByName or, as this engine's extension, an integer of 1 ... 100.
std::optional<int> ReadEffort(const JsonValue& object, const std::string& path,
                              std::string_view key, RequestReader* reader);
// An explicit switch beats an effort of "none".
void SetThinking(std::optional<bool> thinking, std::optional<int> effort,
                 const ConversionOptions& options, Chat* chat);

// Temperature and top_p; after SetThinking.
void ReadSampling(const JsonValue& body, const ConversionOptions& options, RequestReader* reader,
                  ConvertedRequest* request);
void ReadTopLogprobs(const JsonValue& body, RequestReader* reader, ConvertedRequest* request);
// A limit above the bound is refused, or lowered if `lower`. After SetThinking.
void ReadMaxTokens(const JsonValue& body, std::string_view key, bool lower,
                   const ConversionOptions& options, RequestReader* reader,
                   ConvertedRequest* request);
void ReadStop(const JsonValue& body, std::string_view key, bool may_be_string,
              RequestReader* reader, ConvertedRequest* request);

// A response format with a schema: `object` has the members "schema" and "strict".
void ReadResponseSchema(const JsonValue& object, const std::string& path, RequestReader* reader,
                        ConvertedRequest* request);
// The chat's tools and choice, and the constraint that follows; tools win over a response format.
// After the response format; `format_field` is its field if the request has one, else empty: strict
// tools cannot be combined with it.
void SetTools(RequestTools* tools, const RequestedChoice& choice, const std::string& format_field,
              RequestReader* reader, ConvertedRequest* request);

// In thinking mode, if options ask for it, turns after the last user message must have their
// reasoning if they have calls or if there are tools. `field` is the one with the messages.
void CheckReasoningGiven(const Chat& chat, const std::string& field,
                         const ConversionOptions& options, RequestReader* reader);

}  // namespace deepinfer
