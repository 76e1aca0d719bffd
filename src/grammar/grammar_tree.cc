#include "grammar/grammar_tree.h"

#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "base/check.h"
#include "base/utf8.h"

namespace deepinfer {
namespace {

constexpr uint32_t kFirstSurrogate = 0xD800;
constexpr uint32_t kLastSurrogate = 0xDFFF;

// Parts whose UTF-8 has lead bytes of one kind: over wider ranges the library's automata of
// patterns allow overlong forms too.
CodePointSet SplitByLeadBytes(const CodePointSet& ranges) {
  constexpr uint32_t kFirsts[] = {0,      0x80,    0x800,   0x1000,   0xD000,
                                  0xE000, 0x10000, 0x40000, 0x100000, kLastCodePoint + 1};
  CodePointSet parts;
  for (const CodePointRange& range : ranges) {
    for (size_t i = 0; i + 1 < std::size(kFirsts); ++i) {
      const uint32_t first = std::max(range.first, kFirsts[i]);
      const uint32_t last = std::min(range.last, kFirsts[i + 1] - 1);
      if (first <= last) parts.push_back({first, last});
    }
  }
  return parts;
}

bool IsAlphanumeric(uint32_t code_point) {
  return (code_point >= '0' && code_point <= '9') || (code_point >= 'A' && code_point <= 'Z') ||
         (code_point >= 'a' && code_point <= 'z');
}

void AppendEscaped(uint32_t code_point, std::string* out) {
  if (IsAlphanumeric(code_point)) {
    out->push_back(static_cast<char>(code_point));
  } else {
    *out += fmt::format("\\U{:08X}", code_point);
  }
}

// The strongly connected components of a graph that have a cycle: true for their members.
std::vector<int32_t> CyclicComponents(const std::vector<std::vector<int32_t>>& edges) {
  const auto count = static_cast<int32_t>(edges.size());
  std::vector<int32_t> component(edges.size(), -1);
  std::vector<int32_t> index(edges.size(), -1);
  std::vector<int32_t> low(edges.size(), 0);
  std::vector<bool> on_stack(edges.size(), false);
  std::vector<int32_t> stack;
  struct Frame {
    int32_t node;
    size_t next;
  };
  std::vector<Frame> frames;
  int32_t next_index = 0;
  int32_t next_component = 0;
  for (int32_t start = 0; start < count; ++start) {
    if (index[start] != -1) continue;
    frames.push_back({start, 0});
    while (!frames.empty()) {
      Frame& frame = frames.back();
      const int32_t node = frame.node;
      if (frame.next == 0) {
        index[node] = low[node] = next_index++;
        stack.push_back(node);
        on_stack[node] = true;
      }
      if (frame.next < edges[node].size()) {
        const int32_t to = edges[node][frame.next++];
        if (index[to] == -1) {
          frames.push_back({to, 0});
        } else if (on_stack[to]) {
          low[node] = std::min(low[node], index[to]);
        }
        continue;
      }
      if (low[node] == index[node]) {
        const bool single = stack.back() == node;
        const bool loops =
            !single || std::find(edges[node].begin(), edges[node].end(), node) != edges[node].end();
        while (true) {
          const int32_t member = stack.back();
          stack.pop_back();
          on_stack[member] = false;
          component[member] = loops ? next_component : -1;
          if (member == node) break;
        }
        ++next_component;
      }
      frames.pop_back();
      if (!frames.empty()) {
        const int32_t parent = frames.back().node;
        low[parent] = std::min(low[parent], low[node]);
      }
    }
  }
  return component;
}

}  // namespace

CodePointSet Normalized(CodePointSet ranges) {
  CodePointSet split;
  for (const CodePointRange& range : ranges) {
    const uint32_t last = std::min(range.last, kLastCodePoint);
    if (range.first > last) continue;
    if (range.first < kFirstSurrogate) {
      split.push_back({range.first, std::min(last, kFirstSurrogate - 1)});
    }
    if (last > kLastSurrogate) {
      split.push_back({std::max(range.first, kLastSurrogate + 1), last});
    }
  }
  std::sort(split.begin(), split.end(),
            [](const CodePointRange& a, const CodePointRange& b) { return a.first < b.first; });
  CodePointSet merged;
  for (const CodePointRange& range : split) {
    if (!merged.empty() && range.first <= merged.back().last + 1) {
      merged.back().last = std::max(merged.back().last, range.last);
    } else {
      merged.push_back(range);
    }
  }
  return merged;
}

CodePointSet Complement(const CodePointSet& ranges) {
  CodePointSet result;
  uint32_t next = 0;
  for (const CodePointRange& range : Normalized(ranges)) {
    if (range.first > next) result.push_back({next, range.first - 1});
    next = range.last + 1;
  }
  if (next <= kLastCodePoint) result.push_back({next, kLastCodePoint});
  return Normalized(std::move(result));
}

CodePointSet Intersection(const CodePointSet& a, const CodePointSet& b) {
  CodePointSet both = Complement(a);
  const CodePointSet other = Complement(b);
  both.insert(both.end(), other.begin(), other.end());
  return Complement(both);
}

int64_t NextCodePoint(std::string_view text, size_t* offset) {
  const auto at = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const size_t start = *offset;
  const uint8_t lead = at(start);
  if (lead < 0x80) {
    ++*offset;
    return lead;
  }
  const int length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || start + length > text.size()) return -1;
  uint32_t value = lead & (0xFF >> (length + 1));
  for (int i = 1; i < length; ++i) {
    if ((at(start + i) & 0xC0) != 0x80) return -1;
    value = value << 6 | (at(start + i) & 0x3F);
  }
  constexpr uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  if (value < kSmallest[length] || value > kLastCodePoint ||
      (value >= kFirstSurrogate && value <= kLastSurrogate)) {
    return -1;
  }
  *offset += length;
  return value;
}

GrammarTree::NodeId GrammarTree::Add(Node node) {
  for (const NodeId child : node.children) {
    node.depth = std::max(node.depth, nodes_[child].depth + 1);
  }
  nodes_.push_back(std::move(node));
  return static_cast<NodeId>(nodes_.size()) - 1;
}

GrammarTree::NodeId GrammarTree::Empty() {
  return Add({});
}

GrammarTree::NodeId GrammarTree::Literal(std::string_view utf8) {
  if (utf8.empty()) return Empty();
  Node node;
  node.kind = Kind::kLiteral;
  node.text = utf8;
  return Add(std::move(node));
}

GrammarTree::NodeId GrammarTree::Class(CodePointSet ranges) {
  Node node;
  node.kind = Kind::kClass;
  node.ranges = Normalized(std::move(ranges));
  if (node.ranges.empty()) return Choice({});
  return Add(std::move(node));
}

GrammarTree::NodeId GrammarTree::Sequence(std::vector<NodeId> children) {
  if (children.empty()) return Empty();
  if (children.size() == 1) return children[0];
  Node node;
  node.kind = Kind::kSequence;
  node.children = std::move(children);
  return Add(std::move(node));
}

GrammarTree::NodeId GrammarTree::Choice(std::vector<NodeId> children) {
  if (children.size() == 1) return children[0];
  Node node;
  node.kind = Kind::kChoice;
  node.children = std::move(children);
  return Add(std::move(node));
}

GrammarTree::NodeId GrammarTree::Repeat(NodeId child, int64_t min, int64_t max) {
  DI_CHECK(min >= 0 && (max == kUnbounded || max >= min));
  if (max == 0) return Empty();
  if (min == 1 && max == 1) return child;
  Node node;
  node.kind = Kind::kRepeat;
  node.min = min;
  node.max = max;
  node.children = {child};
  return Add(std::move(node));
}

GrammarTree::NodeId GrammarTree::Reference(RuleId rule) {
  Node node;
  node.kind = Kind::kReference;
  node.rule = rule;
  return Add(std::move(node));
}

GrammarTree::NodeId GrammarTree::Token(int32_t id) {
  DI_CHECK_GE(id, 0);
  Node node;
  node.kind = Kind::kToken;
  node.token = id;
  return Add(std::move(node));
}

GrammarTree::Lengths GrammarTree::LengthsOf(NodeId id) const {
  constexpr int64_t kFar = int64_t{1} << 40;
  const Node& node = nodes_[id];
  switch (node.kind) {
    case Kind::kEmpty:
      return {0, 0};
    case Kind::kClass:
      return {1, 1};
    case Kind::kReference:
    case Kind::kToken:
      return {0, kUnbounded};
    case Kind::kLiteral: {
      const auto count = std::count_if(node.text.begin(), node.text.end(),
                                       [](char c) { return (c & 0xC0) != 0x80; });
      return {count, count};
    }
    case Kind::kRepeat: {
      const Lengths child = LengthsOf(node.children[0]);
      const bool open = node.max == kUnbounded || child.max == kUnbounded;
      return {std::min(child.min * node.min, kFar),
              open ? kUnbounded : std::min(child.max * node.max, kFar)};
    }
    case Kind::kSequence: {
      Lengths sum;
      for (const NodeId child_id : node.children) {
        const Lengths child = LengthsOf(child_id);
        sum.min = std::min(sum.min + child.min, kFar);
        sum.max = sum.max == kUnbounded || child.max == kUnbounded
                      ? kUnbounded
                      : std::min(sum.max + child.max, kFar);
      }
      return sum;
    }
    case Kind::kChoice: {
      Lengths both{kFar, 0};
      for (const NodeId child_id : node.children) {
        const Lengths child = LengthsOf(child_id);
        both.min = std::min(both.min, child.min);
        both.max = both.max == kUnbounded || child.max == kUnbounded
                       ? kUnbounded
                       : std::max(both.max, child.max);
      }
      return both;
    }
  }
  return {0, kUnbounded};
}

const CodePointSet* GrammarTree::OnlyClassOf(NodeId id) const {
  const Node& node = nodes_[id];
  if (node.kind == Kind::kClass) return &node.ranges;
  if (node.kind != Kind::kRepeat) return nullptr;
  const Node& child = nodes_[node.children[0]];
  return child.kind == Kind::kClass ? &child.ranges : nullptr;
}

GrammarTree::NodeId GrammarTree::Automaton(NodeId node) {
  nodes_[node].automaton = true;
  return node;
}

GrammarTree::RuleId GrammarTree::AddRule(std::string name) {
  rules_.push_back({std::move(name), -1});
  return static_cast<RuleId>(rules_.size()) - 1;
}

void GrammarTree::SetBody(RuleId rule, NodeId body) {
  rules_[rule].body = body;
}

void GrammarTree::SetMaxCharacters(RuleId rule, int64_t max_characters) {
  rules_[rule].max_characters = max_characters;
}

void GrammarTree::Propagate(Property property, std::vector<bool>* nodes,
                            std::vector<bool>* rules) const {
  const size_t count = nodes_.size();
  nodes->assign(count, false);
  rules->assign(rules_.size(), false);
  // A node may be shared, so it can have several parents.
  std::vector<std::vector<NodeId>> parents(count);
  std::vector<std::vector<NodeId>> references(rules_.size());
  std::vector<std::vector<RuleId>> bodies(count);
  std::vector<int64_t> missing(count, 0);
  std::vector<NodeId> queue;
  for (size_t rule = 0; rule < rules_.size(); ++rule) {
    if (rules_[rule].body >= 0) bodies[rules_[rule].body].push_back(static_cast<RuleId>(rule));
  }
  for (size_t i = 0; i < count; ++i) {
    const Node& node = nodes_[i];
    const auto id = static_cast<NodeId>(i);
    for (const NodeId child : node.children) parents[child].push_back(id);
    bool holds = false;
    switch (node.kind) {
      case Kind::kEmpty:
        holds = true;
        break;
      case Kind::kLiteral:
      case Kind::kClass:
      case Kind::kToken:
        holds = property == Property::kCanEnd;
        break;
      case Kind::kRepeat:
        holds = node.min == 0;
        break;
      case Kind::kReference:
        references[node.rule].push_back(id);
        break;
      case Kind::kSequence:
        missing[i] = static_cast<int64_t>(node.children.size());
        break;
      case Kind::kChoice:
        break;
    }
    if (holds) queue.push_back(id);
  }
  while (!queue.empty()) {
    const NodeId id = queue.back();
    queue.pop_back();
    if ((*nodes)[id]) continue;
    (*nodes)[id] = true;
    for (const NodeId parent : parents[id]) {
      if (nodes_[parent].kind == Kind::kSequence && --missing[parent] > 0) continue;
      queue.push_back(parent);
    }
    for (const RuleId rule : bodies[id]) {
      if ((*rules)[rule]) continue;
      (*rules)[rule] = true;
      for (const NodeId reference : references[rule]) queue.push_back(reference);
    }
  }
}

void GrammarTree::FindReachable() {
  reachable_.assign(rules_.size(), false);
  std::vector<bool> seen(nodes_.size(), false);
  std::vector<NodeId> stack;
  const auto visit_rule = [&](RuleId rule) {
    if (!reachable_[rule]) {
      reachable_[rule] = true;
      stack.push_back(rules_[rule].body);
    }
  };
  visit_rule(0);
  while (!stack.empty()) {
    const NodeId id = stack.back();
    stack.pop_back();
    if (seen[id] || !can_end_[id]) continue;
    seen[id] = true;
    const Node& node = nodes_[id];
    if (node.kind == Kind::kReference) {
      visit_rule(node.rule);
      if (node.rule == 0) root_recurs_ = true;
    }
    // A sequence that can end has no child that cannot.
    stack.insert(stack.end(), node.children.begin(), node.children.end());
  }
}

int64_t GrammarTree::Cost() const {
  // Children have smaller numbers than their parents, so one pass in order is enough. The library
  // writes out up to 128 repetitions and counts the others.
  constexpr int64_t kWrittenOut = 129;
  constexpr int64_t kHuge = kMaxCost * 1000;
  std::vector<int64_t> cost(nodes_.size(), 0);
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const Node& node = nodes_[i];
    if (!can_end_[i]) continue;
    int64_t value = 1;
    switch (node.kind) {
      case Kind::kEmpty:
      case Kind::kReference:
      case Kind::kToken:
        break;
      case Kind::kLiteral:
        value = static_cast<int64_t>(node.text.size());
        break;
      // A range beyond ASCII becomes several byte sequences.
      case Kind::kClass:
        value = 1 + static_cast<int64_t>(node.ranges.size()) / 4;
        break;
      default:
        for (const NodeId child : node.children) value += cost[child];
        if (node.kind == Kind::kRepeat) {
          const int64_t times = node.max == kUnbounded ? node.min + 1 : node.max;
          value *= std::min(times, times > kWrittenOut ? 2 * kWrittenOut : times);
        }
    }
    cost[i] = std::min(value, kHuge);
  }
  int64_t total = 0;
  for (size_t rule = 0; rule < rules_.size(); ++rule) {
    if (reachable_[rule]) total = std::min(total + cost[rules_[rule].body], kHuge);
  }
  return total;
}

Status GrammarTree::CheckRecursion(const std::vector<bool>& can_be_empty) const {
  // Rules that a rule may begin with, may end with, and may consist of alone.
  std::vector<std::vector<int32_t>> first(rules_.size());
  std::vector<std::vector<int32_t>> last(rules_.size());
  std::vector<std::vector<int32_t>> alone(rules_.size());
  struct Visit {
    NodeId node;
    bool at_begin;
    bool at_end;
  };
  // How a node is seen: a bit each for begin and end. Seen again with no new bit: nothing to do.
  std::vector<uint8_t> seen(nodes_.size(), 0);
  std::vector<NodeId> touched;
  for (size_t rule = 0; rule < rules_.size(); ++rule) {
    if (!reachable_[rule]) continue;
    std::vector<Visit> stack = {{rules_[rule].body, true, true}};
    while (!stack.empty()) {
      const Visit visit = stack.back();
      stack.pop_back();
      const auto bits =
          static_cast<uint8_t>(1 << ((visit.at_begin ? 1 : 0) + (visit.at_end ? 2 : 0)));
      if ((seen[visit.node] & bits) != 0 || !can_end_[visit.node]) continue;
      if (seen[visit.node] == 0) touched.push_back(visit.node);
      seen[visit.node] |= bits;
      const Node& node = nodes_[visit.node];
      if (node.kind == Kind::kReference) {
        if (visit.at_begin) first[rule].push_back(node.rule);
        if (visit.at_end) last[rule].push_back(node.rule);
        if (visit.at_begin && visit.at_end) alone[rule].push_back(node.rule);
      } else if (node.kind == Kind::kSequence) {
        const size_t count = node.children.size();
        std::vector<bool> ends(count, false);
        bool end = visit.at_end;
        for (size_t i = count; i-- > 0;) {
          ends[i] = end;
          end = end && can_be_empty[node.children[i]];
        }
        bool begin = visit.at_begin;
        for (size_t i = 0; i < count; ++i) {
          if (begin || ends[i]) stack.push_back({node.children[i], begin, ends[i]});
          begin = begin && can_be_empty[node.children[i]];
        }
      } else {
        for (const NodeId child : node.children) {
          stack.push_back({child, visit.at_begin, visit.at_end});
        }
      }
    }
    for (const NodeId id : touched) seen[id] = 0;
    touched.clear();
  }
  const std::vector<int32_t> alone_component = CyclicComponents(alone);
  const std::vector<int32_t> first_component = CyclicComponents(first);
  const std::vector<int32_t> last_component = CyclicComponents(last);
  for (size_t rule = 0; rule < rules_.size(); ++rule) {
    if (alone_component[rule] >= 0) {
      return Fail(Code::kInvalidArgument,
                  fmt::format("The rule \"{}\" can stand for itself without any other text, so it "
                              "has no meaning of its own.",
                              rules_[rule].name));
    }
    if (first_component[rule] >= 0 && last_component[rule] >= 0) {
      return Fail(Code::kInvalidArgument,
                  fmt::format("The rule \"{}\" refers to itself both at its beginning and at its "
                              "end, so that texts have many readings. Use one of the two, for "
                              "example: list ::= item | item \",\" list.",
                              rules_[rule].name));
    }
  }
  return {};
}

std::vector<bool> GrammarTree::RulesWithText() const {
  std::vector<bool> nodes;
  std::vector<bool> rules;
  Propagate(Property::kCanEnd, &nodes, &rules);
  return rules;
}

Status GrammarTree::Check() {
  if (full()) {
    return Fail(Code::kResourceExhausted,
                fmt::format("The grammar has more than {} parts.", kMaxNodes));
  }
  for (const Node& node : nodes_) {
    if (node.depth > kMaxDepth) {
      return Fail(Code::kResourceExhausted,
                  fmt::format("The grammar is nested more than {} levels deep.", kMaxDepth));
    }
    // The library cuts its strings at a NUL; in a class with others it is safe.
    if (node.text.find('\0') != std::string::npos ||
        (node.kind == Kind::kClass && node.ranges.back().last == 0)) {
      return Fail(Code::kUnsupported,
                  "The grammar asks for the character NUL by itself, which cannot be enforced.");
    }
    if (node.kind == Kind::kRepeat && std::max(node.min, node.max) > kMaxRepeat) {
      return Fail(Code::kResourceExhausted,
                  fmt::format("A repetition of {} times is beyond the limit of {}.",
                              std::max(node.min, node.max), kMaxRepeat));
    }
  }
  for (const Rule& rule : rules_) DI_CHECK(rule.body >= 0);
  std::vector<bool> rules;
  Propagate(Property::kCanEnd, &can_end_, &rules);
  if (!rules[0]) {
    return Fail(Code::kInvalidArgument,
                fmt::format("No finite text matches \"{}\".", rules_[0].name));
  }
  FindReachable();
  const int64_t cost = Cost();
  if (cost > kMaxCost) {
    return Fail(Code::kResourceExhausted,
                fmt::format("The grammar is too large to compile: its estimated {} states are "
                            "beyond the limit of {}. Repetitions of more than one character "
                            "inside each other and long lists of values count most.",
                            cost, kMaxCost));
  }
  std::vector<bool> can_be_empty;
  Propagate(Property::kCanBeEmpty, &can_be_empty, &rules);
  return CheckRecursion(can_be_empty);
}

std::string GrammarTree::RuleName(RuleId rule) const {
  return rule == 0 && !root_recurs_ ? "root" : fmt::format("r{}", rule);
}

// Written with quantified groups as rules of their own, each character of a string would be a
// place where the library must look at the surroundings, for most of the vocabulary.
void GrammarTree::PrintAutomaton(NodeId id, std::string* out) const {
  std::string pattern;
  PrintPattern(id, &pattern);
  *out += "Regex(\"";
  for (const char c : pattern) {
    if (c == '"' || c == '\\') *out += '\\';
    *out += c;
  }
  *out += "\")";
}

void GrammarTree::PrintPattern(NodeId id, std::string* out) const {
  const auto append = [](uint32_t code_point, std::string* to) {
    if (IsAlphanumeric(code_point)) {
      to->push_back(static_cast<char>(code_point));
    } else {
      *to += fmt::format("\\u{{{:X}}}", code_point);
    }
  };
  const Node& node = nodes_[id];
  switch (node.kind) {
    case Kind::kEmpty:
      break;
    case Kind::kLiteral: {
      size_t offset = 0;
      while (offset < node.text.size()) {
        const int64_t code_point = NextCodePoint(node.text, &offset);
        DI_CHECK(code_point >= 0);
        append(static_cast<uint32_t>(code_point), out);
      }
      break;
    }
    case Kind::kClass: {
      // The ranges of ASCII together, each of the others by itself: the library joins neighbours.
      std::string ascii;
      std::string others;
      for (const CodePointRange& range : SplitByLeadBytes(node.ranges)) {
        std::string* to = range.last < 0x80 ? &ascii : &others;
        if (to == &others) others += "|[";
        append(range.first, to);
        if (range.last != range.first) {
          *to += '-';
          append(range.last, to);
        }
        if (to == &others) others += ']';
      }
      *out += "(?:";
      if (!ascii.empty()) *out += "[" + ascii + "]";
      *out += others.substr(ascii.empty() && !others.empty() ? 1 : 0) + ")";
      break;
    }
    case Kind::kSequence:
      for (const NodeId child : node.children) PrintPattern(child, out);
      break;
    case Kind::kChoice: {
      std::string choices;
      for (const NodeId child : node.children) {
        if (!can_end_[child]) continue;
        if (!choices.empty()) choices += '|';
        PrintPattern(child, &choices);
      }
      *out += "(?:" + choices + ")";
      break;
    }
    case Kind::kRepeat: {
      if (!can_end_[node.children[0]]) break;
      // Written out with alternatives: the library's "(x{2,3})?" matches one x, and its "(ax*)?"
      // matches anything.
      std::string inner;
      PrintPattern(node.children[0], &inner);
      inner = "(?:" + inner + ")";
      for (int64_t i = 0; i < node.min; ++i) *out += inner;
      if (node.max == kUnbounded) *out += inner + "*";
      for (int64_t i = node.min; i < node.max; ++i) *out += "(?:" + inner;
      for (int64_t i = node.min; i < node.max; ++i) *out += "|)";
      break;
    }
    case Kind::kToken:
    case Kind::kReference:
      DI_CHECK(false);
  }
}

void GrammarTree::Print(NodeId id, std::string* out) const {
  const Node& node = nodes_[id];
  if (node.automaton) {
    PrintAutomaton(id, out);
    return;
  }
  switch (node.kind) {
    case Kind::kEmpty:
      *out += "\"\"";
      break;
    case Kind::kLiteral: {
      *out += '"';
      size_t offset = 0;
      while (offset < node.text.size()) {
        const int64_t code_point = NextCodePoint(node.text, &offset);
        DI_CHECK(code_point >= 0);
        AppendEscaped(static_cast<uint32_t>(code_point), out);
      }
      *out += '"';
      break;
    }
    case Kind::kClass:
      *out += '[';
      for (const CodePointRange& range : node.ranges) {
        AppendEscaped(range.first, out);
        if (range.last != range.first) {
          *out += '-';
          AppendEscaped(range.last, out);
        }
      }
      *out += ']';
      break;
    case Kind::kSequence:
    case Kind::kChoice: {
      *out += '(';
      bool first = true;
      for (const NodeId child : node.children) {
        if (!can_end_[child]) continue;
        if (!first) *out += node.kind == Kind::kSequence ? " " : " | ";
        first = false;
        Print(child, out);
      }
      *out += ')';
      break;
    }
    case Kind::kRepeat:
      if (!can_end_[node.children[0]]) {  // none of it, then
        *out += "\"\"";
        break;
      }
      *out += '(';
      Print(node.children[0], out);
      *out += ')';
      if (node.max == kUnbounded && node.min <= 1) {
        *out += node.min == 0 ? '*' : '+';
      } else if (node.max == kUnbounded) {
        *out += fmt::format("{{{},}}", node.min);
      } else if (node.min == 0 && node.max == 1) {
        *out += '?';
      } else {
        *out += fmt::format("{{{},{}}}", node.min, node.max);
      }
      break;
    case Kind::kReference:
      *out += RuleName(node.rule);
      break;
    case Kind::kToken:
      *out += fmt::format("Token({})", node.token);
      break;
  }
}

std::string GrammarTree::ToEbnf() const {
  // The library takes the end of its root for the end of the text: in a root that stands inside
  // itself, its masks would leave out the tokens that go on behind the inner one.
  std::string out = root_recurs_ ? "root ::= r0\n" : "";
  for (size_t rule = 0; rule < rules_.size(); ++rule) {
    if (!reachable_[rule]) continue;
    out += RuleName(static_cast<RuleId>(rule));
    if (rules_[rule].max_characters >= 0) {
      out += fmt::format("[max_chars={}]", rules_[rule].max_characters);
    }
    out += " ::= ";
    Print(rules_[rule].body, &out);
    out += '\n';
  }
  return out;
}

}  // namespace deepinfer
