// A grammar as a tree: what schemas, patterns, rules and choices are all read into before anything
// is handed to the grammar library. It is checked here, where every loop is linear and every size
// bounded, and then printed in the library's notation. Not a parser: it never sees the output text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace deepinfer {

inline constexpr uint32_t kLastCodePoint = 0x10FFFF;

struct CodePointRange {
  uint32_t first = 0;
  uint32_t last = 0;  // included

  friend bool operator==(const CodePointRange&, const CodePointRange&) = default;
};
using CodePointSet = std::vector<CodePointRange>;

// Sorted, merged, without surrogates (they are not characters).
CodePointSet Normalized(CodePointSet ranges);
// Every character outside `ranges`.
CodePointSet Complement(const CodePointSet& ranges);
CodePointSet Intersection(const CodePointSet& a, const CodePointSet& b);
// The code point at *offset, which moves past it; -1 when the bytes are not UTF-8.
int64_t NextCodePoint(std::string_view text, size_t* offset);

class GrammarTree {
 public:
  using NodeId = int32_t;
  using RuleId = int32_t;
  static constexpr int64_t kUnbounded = -1;

  // What one grammar may have. The cost estimates the states of the automata that the library
  // builds, from which its compile time and memory follow.
  static constexpr int64_t kMaxNodes = 400'000;
  static constexpr int64_t kMaxCost = 60'000;
  static constexpr int64_t kMaxRepeat = 10'000'000;
  static constexpr int kMaxDepth = 200;

  NodeId Empty();
  NodeId Literal(std::string_view utf8);
  NodeId Class(CodePointSet ranges);  // one character; an empty set matches nothing
  NodeId Sequence(std::vector<NodeId> children);
  NodeId Choice(std::vector<NodeId> children);  // without children: matches nothing
  NodeId Repeat(NodeId child, int64_t min, int64_t max);
  NodeId Reference(RuleId rule);
  // Makes one automaton of the node, which is to have no references and no great repetition below
  // it: the library's masks inside it need no look at the surroundings. Only for shapes that the
  // tests of this module compare in all their texts: the library's automata of patterns in general
  // are not always right.
  NodeId Automaton(NodeId node);
  // One token, by its id: no text that other tokens spell.
  NodeId Token(int32_t id);

  // Characters of a text that the node matches, at least and at most (kUnbounded: no limit).
  // Without references.
  struct Lengths {
    int64_t min = 0;
    int64_t max = 0;
  };
  Lengths LengthsOf(NodeId node) const;
  // For a node that is some number of characters of one class: that class; else null.
  const CodePointSet* OnlyClassOf(NodeId node) const;

  // Rules are numbered from 0 in the order of their creation; the first is the root. The name is
  // for error messages only.
  RuleId AddRule(std::string name);
  void SetBody(RuleId rule, NodeId body);
  // The rule's text has at most this many characters, or ends where it may end next behind them.
  void SetMaxCharacters(RuleId rule, int64_t max_characters);
  bool full() const {
    return static_cast<int64_t>(nodes_.size()) >= kMaxNodes;
  }
  int64_t num_rules() const {
    return static_cast<int64_t>(rules_.size());
  }

  // Before anything is printed. Alternatives that no finite text matches are left out from here on.
  // Errors: kResourceExhausted for a size; kInvalidArgument when no text is left, or naming a rule
  // that stands for itself or recurs at both of its ends.
  Status Check();

  // By rule: whether a finite text matches it. What Check leaves out otherwise shows nowhere.
  std::vector<bool> RulesWithText() const;

  // The estimate that Check limits. Only of a checked tree.
  int64_t Cost() const;

  // In the library's notation, with the rule "root" first. Only of a checked tree. Rules that the
  // root does not reach are left out.
  std::string ToEbnf() const;

 private:
  enum class Kind : uint8_t {
    kEmpty,
    kLiteral,
    kClass,
    kSequence,
    kChoice,
    kRepeat,
    kReference,
    kToken,
  };
  struct Node {
    Kind kind = Kind::kEmpty;
    int depth = 1;
    int64_t min = 0;
    int64_t max = 0;
    RuleId rule = -1;
    bool automaton = false;
    int32_t token = -1;
    std::string text;
    CodePointSet ranges;
    std::vector<NodeId> children;
  };
  struct Rule {
    std::string name;
    NodeId body = -1;
    int64_t max_characters = -1;  // -1: any number
  };

  NodeId Add(Node node);
  // Of every node and rule, whether `base` holds at its leaves and carries upwards: through all
  // children of a sequence, any of a choice.
  enum class Property : uint8_t { kCanEnd, kCanBeEmpty };
  void Propagate(Property property, std::vector<bool>* nodes, std::vector<bool>* rules) const;
  void FindReachable();
  Status CheckRecursion(const std::vector<bool>& can_be_empty) const;
  void Print(NodeId id, std::string* out) const;
  void PrintAutomaton(NodeId id, std::string* out) const;
  void PrintPattern(NodeId id, std::string* out) const;
  std::string RuleName(RuleId rule) const;

  std::vector<Node> nodes_;
  std::vector<Rule> rules_;
  // Set by Check.
  std::vector<bool> can_end_;    // by node
  std::vector<bool> reachable_;  // by rule, through nodes that can end
  bool root_recurs_ = false;     // a reachable node refers to it
};

}  // namespace deepinfer
