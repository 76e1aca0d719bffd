// One function per protocol. What they return counts only if the reader has no problem.
#pragma once

#include "text/request_fields.h"

namespace deepinfer {

ConvertedRequest ConvertChatCompletions(const JsonValue& body, const ConversionOptions& options,
                                        RequestReader* reader);
ConvertedRequest ConvertMessages(const JsonValue& body, const ConversionOptions& options,
                                 RequestReader* reader);
ConvertedRequest ConvertResponses(const JsonValue& body, const ConversionOptions& options,
                                  RequestReader* reader);

}  // namespace deepinfer
