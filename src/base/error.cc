#include "base/error.h"

namespace deepinfer {

std::string_view CodeName(Code code) {
  switch (code) {
    case Code::kInvalidArgument:
      return "invalid_argument";
    case Code::kNotFound:
      return "not_found";
    case Code::kUnsupported:
      return "unsupported";
    case Code::kResourceExhausted:
      return "resource_exhausted";
    case Code::kDeadline:
      return "deadline";
    case Code::kCancelled:
      return "cancelled";
    case Code::kUnavailable:
      return "unavailable";
    case Code::kDataLoss:
      return "data_loss";
    case Code::kInternal:
      return "internal";
  }
  return "unknown";
}

Error Joined(const std::vector<Error>& problems) {
  Error all = problems.front();
  for (size_t i = 1; i < problems.size(); ++i) all.message += " " + problems[i].message;
  return all;
}

}  // namespace deepinfer
