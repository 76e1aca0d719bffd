// Conversations: what the chat encoding turns into a prompt, and the message that an answer is
// parsed into. docs/chat.md explains the rules. Part of the public interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace deepinfer {

// The rules that prompts follow. They agree on ordinary conversations; docs/chat.md lists where
// they differ.
enum class EncodingProfile : uint8_t {
  kRecipe,      // the vendor's toolkit for servers
  kCheckpoint,  // the encoder published with the checkpoint
};

// The template of a model generation: read from the checkpoint.
enum class ChatDialect : uint8_t {
  kV41,  // system token, effort line, "<｜DSML｜ calls>"
  kV4,   // no system token, effort as a text, "<｜DSML｜tool_calls>"
};

enum class Role : uint8_t { kSystem, kUser, kAssistant, kTool, kLatestReminder };

struct ImageSource {
  std::string url;              // http(s) or a data URL
  std::string detail = "high";  // low, high, original, auto
  std::string path;             // where in the request, for messages; may be empty
};

// Text with images in it. An image stands before the byte `image_offsets[i]` of the text; whatever
// the text spells, it holds no image and no special token.
struct Content {
  std::string text;                   // UTF-8
  std::vector<size_t> image_offsets;  // ascending, at most text.size()
  // One per offset. Further ones have no place in the text; the recipe profile counts them, and no
  // model can run them.
  std::vector<ImageSource> images;
};

struct ToolCall {
  std::string id;  // may be empty
  std::string name;
  std::string arguments;  // a JSON object as text; other texts are allowed and rendered as such
};

// A function that the model may call.
struct Tool {
  std::string name;
  // The whole function object as JSON text as the caller sent it, with "name", "description",
  // "parameters" and whatever else. The recipe profile shows the model name, description and
  // parameters; the checkpoint profile shows all of it.
  std::string function;
  // Recipe profile: what is shown in place of the function's own "parameters" (JSON text), because
  // `strict` has rebuilt them. Empty: the function's own.
  std::string recipe_parameters;
  bool strict = false;         // as sent
  bool defer_loading = false;  // declared, but not listed in the prompt (recipe profile)
};

// A part of a user turn; parts are joined by blank lines.
struct ContentBlock {
  enum class Kind : uint8_t { kText, kToolResult, kUnsupported };
  Kind kind = Kind::kText;
  Content content;                          // of kUnsupported: the type's name
  std::optional<std::string> tool_call_id;  // of kToolResult
};

struct Message {
  Role role = Role::kUser;
  Content content;
  // User turns of the checkpoint profile: used instead of `content` unless empty.
  std::vector<ContentBlock> blocks;
  std::optional<std::string> reasoning_content;  // kAssistant
  std::vector<ToolCall> tool_calls;              // kAssistant
  std::optional<std::string> tool_call_id;       // kTool
  // kAssistant: the turn is not closed. As the last message: the answer goes on from here. (In the
  // checkpoint's own message format: `wo_eos`.)
  bool prefix = false;
  // Tools of a system message: in the recipe profile those that arrive late, in the checkpoint
  // profile the tool list.
  std::vector<Tool> tools;
  // Checkpoint profile only. JSON text; and "action", "query", "authority", "domain", "title" or
  // "read_url".
  std::optional<std::string> response_format;
  std::optional<std::string> task;
};

enum class ToolChoice : uint8_t {
  kAuto,
  kNone,      // the tools are hidden
  kRequired,  // the answer begins inside of a call
};

struct ResponseFormat {
  enum class Kind : uint8_t { kText, kJsonObject, kJsonSchema, kRegex };
  Kind kind = Kind::kText;
  std::string schema;  // JSON text, or the pattern
};

struct Chat {
  std::vector<Message> messages;
  bool thinking = true;  // the model reasons before it answers
  // 1 ... 100; only if `thinking`. The prompt states it, it limits nothing. kV4 knows three steps:
  // nothing below 75, one text below 100, another at 100.
  int reasoning_effort = 75;
  std::vector<Tool> tools;
  ToolChoice tool_choice = ToolChoice::kAuto;
  ResponseFormat response_format;
  EncodingProfile profile = EncodingProfile::kRecipe;
  bool drop_thinking = true;  // checkpoint profile: leaves reasoning before the last user turn out
};

// An answer, parsed.
struct ParsedMessage {
  std::string reasoning_content;
  std::string content;
  std::vector<ToolCall> tool_calls;  // only finished ones
};

}  // namespace deepinfer
