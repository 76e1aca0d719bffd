// Where the grammar library's messages end up. The library is built with custom logging: a fatal
// check throws (and is caught where we call it), any other message is dropped. Nothing is printed.

#include <stdexcept>
#include <string>

namespace xgrammar {

[[noreturn]] void LogFatalImpl(const std::string& file, int lineno, const std::string& message);
void LogMessageImpl(const std::string& file, int lineno, int level, const std::string& message);

void LogFatalImpl(const std::string& /*file*/, int /*lineno*/, const std::string& message) {
  throw std::runtime_error(message);
}

void LogMessageImpl(const std::string& /*file*/, int /*lineno*/, int /*level*/,
                    const std::string& /*message*/) {}

}  // namespace xgrammar
