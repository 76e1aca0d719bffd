#include "state/prefix_cache.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <unordered_map>
#include <utility>

#include "base/check.h"

namespace deepinfer {
namespace {

// Siblings that begin with the same token and are compared with a block that is not known: the most
// recently used ones. Bounds the work under a beginning that thousands of sequences share.
constexpr int kMaxCandidates = 64;

uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t x = (a ^ (b * 0x9e3779b97f4a7c15u)) * 0xbf58476d1ce4e5b9u;
  x ^= x >> 32;
  x *= 0x94d049bb133111ebu;
  return x ^ (x >> 29);
}

uint64_t HashTokens(std::span<const int32_t> tokens) {
  // Four independent lanes, because the multiplications of one would wait for each other.
  std::array<uint64_t, 4> lanes = {1, 2, 3, 4};
  size_t i = 0;
  for (; i + 8 <= tokens.size(); i += 8) {
    for (size_t lane = 0; lane < 4; ++lane) {
      uint64_t pair = 0;
      std::memcpy(&pair, tokens.data() + i + 2 * lane, sizeof(pair));
      lanes[lane] = (lanes[lane] ^ pair) * 0x9e3779b97f4a7c15u;
      lanes[lane] ^= lanes[lane] >> 29;
    }
  }
  uint64_t hash = tokens.size();
  for (; i < tokens.size(); ++i) hash = Mix(hash, static_cast<uint32_t>(tokens[i]));
  for (const uint64_t lane : lanes) hash = Mix(hash, lane);
  return hash;
}

int64_t CommonPrefix(std::span<const int32_t> a, std::span<const int32_t> b) {
  const size_t n = std::min(a.size(), b.size());
  return std::mismatch(a.begin(), a.begin() + static_cast<int64_t>(n), b.begin()).first - a.begin();
}

struct StringHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const {
    return std::hash<std::string_view>{}(text);
  }
};

}  // namespace

struct PrefixCache::Node {
  Node* parent = nullptr;
  uint64_t serial = 0;  // of this use of the memory; 0: not in use
  uint64_t hash = 0;    // of the tokens, if the block is full
  int32_t block = -1;
  int32_t page = -1;
  int32_t depth = 0;  // blocks up to and with this one; 0: the root of a salt
  int32_t fill = 0;   // tokens of this block
  int32_t num_children = 0;
  bool is_end = false;                // a sequence has ended here
  const std::string* salt = nullptr;  // of a root
  // Children of the parent, in no particular order.
  Node* first_child = nullptr;
  Node* next_sibling = nullptr;
  Node* previous_sibling = nullptr;
  // Full siblings with the same hash.
  Node* next_equal = nullptr;
  // Siblings with the same first token, most recently used first.
  Node* older = nullptr;
  Node* newer = nullptr;
  std::array<int32_t, kBlockTokens> token_ids;

  std::span<const int32_t> tokens() const {
    return {token_ids.data(), static_cast<size_t>(fill)};
  }
  bool is_root() const {
    return depth == 0;
  }
  bool is_full() const {
    return fill == kBlockTokens;
  }
  // Tokens up to and with this block.
  int64_t end() const {
    return is_root() ? 0 : (depth - 1) * kBlockTokens + fill;
  }
};

struct PrefixCache::Tree {
  struct Key {
    const Node* parent;
    uint64_t value;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    size_t operator()(const Key& key) const {
      return Mix(key.parent->serial, key.value);
    }
  };

  uint64_t hash_mask = 0;
  std::deque<Node> storage;
  std::vector<Node*> unused;
  uint64_t last_serial = 0;
  int64_t num_nodes = 0;  // without roots
  std::unordered_map<std::string, Node*, StringHash, std::equal_to<>> roots;
  std::unordered_map<Key, Node*, KeyHash> full;     // by hash: first of the equal ones
  std::unordered_map<Key, Node*, KeyHash> similar;  // by first token: most recently used one
  std::vector<Node*> node_of_block;
  std::vector<Node*> node_of_page;

  Node* New() {
    Node* node = nullptr;
    if (unused.empty()) {
      node = &storage.emplace_back();
    } else {
      node = unused.back();
      unused.pop_back();
    }
    node->serial = ++last_serial;
    return node;
  }

  void Free(Node* node) {
    *node = Node{};
    unused.push_back(node);
  }

  Node* NewRoot(std::string_view salt) {
    const auto added = roots.emplace(std::string(salt), New()).first;
    added->second->salt = &added->first;
    return added->second;
  }

  void FreeRoot(Node* root) {
    roots.erase(roots.find(*root->salt));
    Free(root);
  }

  static Key SimilarKey(const Node* parent, int32_t token) {
    return {parent, static_cast<uint32_t>(token)};
  }

  uint64_t Hash(std::span<const int32_t> tokens) const {
    return HashTokens(tokens) & hash_mask;
  }

  // The child with exactly these kBlockTokens tokens, or null.
  Node* FindFull(const Node* parent, std::span<const int32_t> tokens) const {
    if (parent->num_children == 0) return nullptr;
    const auto found = full.find({parent, Hash(tokens)});
    if (found == full.end()) return nullptr;
    Node* node = found->second;
    while (node != nullptr && !std::ranges::equal(node->tokens(), tokens)) node = node->next_equal;
    return node;
  }

  Node* FirstSimilar(const Node* parent, int32_t token) const {
    if (parent->num_children == 0) return nullptr;
    const auto found = similar.find(SimilarKey(parent, token));
    return found == similar.end() ? nullptr : found->second;
  }

  void Link(Node* node) {
    Node* parent = node->parent;
    node->next_sibling = parent->first_child;
    if (node->next_sibling != nullptr) node->next_sibling->previous_sibling = node;
    parent->first_child = node;
    ++parent->num_children;
    if (node->is_full()) {
      node->hash = Hash(node->tokens());
      Node*& first = full[{parent, node->hash}];
      node->next_equal = std::exchange(first, node);
    }
    LinkSimilar(node);
    ++num_nodes;
  }

  void LinkSimilar(Node* node) {
    Node*& newest = similar[SimilarKey(node->parent, node->token_ids[0])];
    node->newer = nullptr;
    node->older = std::exchange(newest, node);
    if (node->older != nullptr) node->older->newer = node;
  }

  void UnlinkSimilar(Node* node) {
    if (node->older != nullptr) node->older->newer = node->newer;
    if (node->newer != nullptr) {
      node->newer->older = node->older;
      return;
    }
    const auto found = similar.find(SimilarKey(node->parent, node->token_ids[0]));
    found->second = node->older;
    if (node->older == nullptr) similar.erase(found);
  }

  void Unlink(Node* node) {
    Node* parent = node->parent;
    if (node->next_sibling != nullptr)
      node->next_sibling->previous_sibling = node->previous_sibling;
    (node->previous_sibling != nullptr ? node->previous_sibling->next_sibling
                                       : parent->first_child) = node->next_sibling;
    --parent->num_children;
    if (node->is_full()) {
      const auto found = full.find({parent, node->hash});
      Node** link = &found->second;
      while (*link != node) link = &(*link)->next_equal;
      *link = node->next_equal;
      if (found->second == nullptr) full.erase(found);
    }
    UnlinkSimilar(node);
    --num_nodes;
  }

  // Becomes the most recently used among its similar siblings.
  void MoveToFront(Node* node) {
    if (node->newer == nullptr) return;
    node->newer->older = node->older;
    if (node->older != nullptr) node->older->newer = node->newer;
    Node*& newest = similar.find(SimilarKey(node->parent, node->token_ids[0]))->second;
    node->newer = nullptr;
    node->older = std::exchange(newest, node);
    node->older->newer = node;
  }
};

PrefixCache::PrefixCache(StatePools& pools, uint64_t hash_mask)
    : pools_(pools), tree_(std::make_unique<Tree>()) {
  tree_->hash_mask = hash_mask;
  tree_->node_of_block.resize(static_cast<size_t>(pools.blocks.size()));
  tree_->node_of_page.resize(static_cast<size_t>(pools.window_pages.size()));
  pools_.reclaim_block = [this] { ReclaimBlock(); };
  pools_.reclaim_window_page = [this] { ReclaimWindowPage(); };
}

PrefixCache::~PrefixCache() {
  Clear();
  pools_.reclaim_block = nullptr;
  pools_.reclaim_window_page = nullptr;
}

int64_t PrefixCache::num_nodes() const {
  return tree_->num_nodes;
}

SharedPrefix PrefixCache::Find(std::string_view salt, std::span<const int32_t> tokens,
                               int64_t limit, WindowNeed need) {
  SharedPrefix prefix;
  ++counters_.lookups;
  counters_.looked_up_tokens += std::ssize(tokens);
  const auto root = tree_->roots.find(salt);
  if (root == tree_->roots.end()) return prefix;
  tokens = tokens.first(static_cast<size_t>(std::clamp<int64_t>(limit, 0, std::ssize(tokens))));

  // Whole blocks, then the longest common beginning with a child of the last.
  Node* last = root->second;
  std::span<const int32_t> rest = tokens;
  while (rest.size() >= kBlockTokens) {
    Node* child = tree_->FindFull(last, rest.first(kBlockTokens));
    if (child == nullptr) break;
    last = child;
    rest = rest.subspan(kBlockTokens);
  }
  int64_t matched = last->end();
  if (!rest.empty()) {
    Node* best = nullptr;
    int64_t longest = 0;
    int visited = 0;
    for (Node* node = tree_->FirstSimilar(last, rest[0]);
         node != nullptr && visited < kMaxCandidates; node = node->older, ++visited) {
      const int64_t common = CommonPrefix(node->tokens(), rest);
      if (common > longest) {
        longest = common;
        best = node;
      }
    }
    // One token more than an even number is of no use.
    if (longest >= 2) {
      last = best;
      matched += longest;
    }
  }
  matched -= matched % 2;

  // Down the path from its end: the longest prefix whose window history is there.
  const int64_t history = pools_.window - 1;
  Node* node = last;
  if (need == WindowNeed::kExact && history > 0) {
    while (!node->is_root()) {
      if (node->page < 0) {
        node = node->parent;
        continue;
      }
      const int64_t end = std::min(matched, node->end() - node->end() % 2);
      const Node* oldest = node;  // of an unbroken row of pages
      while (oldest->parent->page >= 0 && (oldest->depth - 1) * kBlockTokens > end - history)
        oldest = oldest->parent;
      const int64_t first_position = (oldest->depth - 1) * kBlockTokens;
      if (first_position <= std::max<int64_t>(0, end - history)) break;
      // Shorter prefixes within the same row would begin even earlier.
      node = oldest->parent;
    }
    matched = std::min(matched, node->end() - node->end() % 2);
  }
  if (matched == 0) return prefix;

  ++counters_.hits;
  counters_.hit_tokens += matched;
  prefix.num_tokens = matched;
  prefix.first_window_page = std::max<int64_t>(0, matched - history) / kBlockTokens;
  prefix.blocks.resize(static_cast<size_t>(node->depth));
  if (need == WindowNeed::kExact && history > 0)
    prefix.window_pages.resize(static_cast<size_t>(node->depth - prefix.first_window_page));
  for (; !node->is_root(); node = node->parent) {
    const int64_t index = node->depth - 1;
    prefix.blocks[static_cast<size_t>(index)] = node->block;
    const int64_t page_index = index - prefix.first_window_page;
    if (page_index >= 0 && !prefix.window_pages.empty())
      prefix.window_pages[static_cast<size_t>(page_index)] = node->page;
    Touch(node);
  }
  return prefix;
}

void PrefixCache::Insert(std::string_view salt, std::span<const int32_t> tokens,
                         const SequenceState& state, bool is_end, Cursor* cursor) {
  const int64_t num_tokens = std::ssize(tokens);
  DI_CHECK_LE(num_tokens, state.num_tokens());
  const int64_t num_full = num_tokens / kBlockTokens;
  if (cursor != nullptr && num_full == cursor->num_blocks && !is_end) return;
  if (num_full == 0 && !is_end) return;

  Node* start = nullptr;
  if (cursor != nullptr && cursor->num_blocks <= num_full) start = CursorNode(*cursor);
  if (start == nullptr) {
    const auto root = tree_->roots.find(salt);
    start = root == tree_->roots.end() ? tree_->NewRoot(salt) : root->second;
  }
  Node* last = start;
  while (last->depth < num_full) {
    Node* next = Record(
        last, tokens.subspan(static_cast<size_t>(last->depth * kBlockTokens), kBlockTokens), state);
    if (next == nullptr) break;
    last = next;
  }
  if (is_end && last->depth == num_full)
    RecordEnd(last, tokens.subspan(static_cast<size_t>(num_full * kBlockTokens)), state);
  if (cursor != nullptr) *cursor = {num_full, last->serial, last->block};
  // Used from the end on, so that what is deeper counts as older.
  for (Node* node = last; node != start; node = node->parent) Touch(node);
  if (last->is_root() && last->num_children == 0) tree_->FreeRoot(last);
}

// The node of a cursor, or null if it has been evicted.
PrefixCache::Node* PrefixCache::CursorNode(const Cursor& cursor) const {
  if (cursor.block < 0) return nullptr;
  Node* node = tree_->node_of_block[static_cast<size_t>(cursor.block)];
  if (node == nullptr || node->serial != cursor.serial || node->depth != cursor.num_blocks)
    return nullptr;
  return node;
}

// The child of `parent` with the full or partly filled block of these tokens: a known one, or a new
// one with the state's block. Null if the state's block cannot be recorded, because it is recorded
// with other tokens.
PrefixCache::Node* PrefixCache::Record(Node* parent, std::span<const int32_t> tokens,
                                       const SequenceState& state) {
  const bool is_full = tokens.size() == kBlockTokens;
  Node* node = is_full ? tree_->FindFull(parent, tokens) : nullptr;
  // Partly filled siblings that these tokens extend, or that extend these tokens.
  Node* shorter = nullptr;
  if (node == nullptr) {
    int visited = 0;
    for (Node* other = tree_->FirstSimilar(parent, tokens[0]);
         other != nullptr && visited < kMaxCandidates; other = other->older, ++visited) {
      const int64_t common = CommonPrefix(other->tokens(), tokens);
      if (!is_full && common == std::ssize(tokens)) {
        node = other;
        break;
      }
      if (common == other->fill && !other->is_full()) shorter = other;
    }
  }
  if (node == nullptr) {
    const int32_t block = state.blocks()[static_cast<size_t>(parent->depth)];
    const Node* owner = tree_->node_of_block[static_cast<size_t>(block)];
    if (owner != nullptr && owner != shorter) return nullptr;
    node = tree_->New();
    node->parent = parent;
    node->depth = parent->depth + 1;
    node->fill = static_cast<int32_t>(tokens.size());
    std::ranges::copy(tokens, node->token_ids.begin());
    tree_->Link(node);
    if (shorter != nullptr) RemoveLeaf(shorter);
    node->block = block;
    tree_->node_of_block[static_cast<size_t>(block)] = node;
    pools_.blocks.RetainForCache(block);
    ++counters_.inserted_blocks;
    RankPages(parent, BlockPool::Place::kLast);
  }
  if (node->fill <= std::ssize(tokens)) TakeOverPage(node, state);
  return node;
}

void PrefixCache::RecordEnd(Node* parent, std::span<const int32_t> tokens,
                            const SequenceState& state) {
  Node* last = parent;
  if (tokens.size() >= 2) {
    Node* node = Record(parent, tokens, state);
    if (node != nullptr) {
      last = node;
      Touch(node);
    }
  }
  if (last->is_root() || last->is_end) return;
  last->is_end = true;
  RankPages(last, BlockPool::Place::kLast);
}

void PrefixCache::TakeOverPage(Node* node, const SequenceState& state) {
  const int64_t index = node->depth - 1;
  const int64_t held = index - state.first_window_page();
  if (node->page >= 0 || held < 0 || held >= std::ssize(state.window_pages())) return;
  // The first page of a restored image may lack rows.
  if (index * kBlockTokens < state.window_begin()) return;
  const int32_t page = state.window_pages()[static_cast<size_t>(held)];
  if (pools_.window_pages.cached(page)) return;
  node->page = page;
  tree_->node_of_page[static_cast<size_t>(page)] = node;
  pools_.window_pages.RetainForCache(page);
  pools_.window_pages.SetRank(page, PageIsWanted(node) ? 1 : 0, BlockPool::Place::kLast);
}

// Whether a continuation at an end or branch point, or up to two tokens before it, reads the page.
bool PrefixCache::PageIsWanted(const Node* node) const {
  for (const Node* point = node; point->end() - node->end() <= pools_.window;
       point = point->first_child) {
    if (point->is_end || point->num_children != 1) return true;
  }
  return false;
}

// After a change of the node or its children: it and the ancestors that its window reaches.
void PrefixCache::RankPages(Node* node, BlockPool::Place place) {
  const int64_t end = node->end();
  for (; !node->is_root() && end - node->end() <= pools_.window; node = node->parent) {
    if (node->page >= 0) pools_.window_pages.SetRank(node->page, PageIsWanted(node) ? 1 : 0, place);
  }
}

void PrefixCache::Touch(Node* node) {
  pools_.blocks.Touch(node->block);
  if (node->page >= 0) pools_.window_pages.Touch(node->page);
  tree_->MoveToFront(node);
}

void PrefixCache::ReclaimBlock() {
  // The first of the list is a leaf, but for ancestors whose descendants are in use: those count as
  // used just now.
  Node* deepest = nullptr;
  int32_t id = pools_.blocks.FirstReclaimable();
  for (int64_t i = pools_.blocks.num_reclaimable(); i > 0; --i) {
    Node* node = tree_->node_of_block[static_cast<size_t>(id)];
    if (node->num_children == 0) {
      deepest = node;
      break;
    }
    if (deepest == nullptr || node->depth > deepest->depth) deepest = node;
    const int32_t next = pools_.blocks.NextReclaimable(id);
    pools_.blocks.Touch(id);
    id = next;
  }
  DI_CHECK(deepest != nullptr);
  counters_.evicted_blocks += RemoveSubtree(deepest);
}

void PrefixCache::ReclaimWindowPage() {
  const int32_t id = pools_.window_pages.FirstReclaimable();
  DI_CHECK_GE(id, 0);
  DropPage(tree_->node_of_page[static_cast<size_t>(id)]);
  ++counters_.evicted_window_pages;
}

void PrefixCache::DropPage(Node* node) {
  tree_->node_of_page[static_cast<size_t>(node->page)] = nullptr;
  pools_.window_pages.ReleaseFromCache(std::exchange(node->page, -1));
}

void PrefixCache::RemoveLeaf(Node* node) {
  Node* parent = node->parent;
  tree_->Unlink(node);
  if (node->page >= 0) DropPage(node);
  tree_->node_of_block[static_cast<size_t>(node->block)] = nullptr;
  pools_.blocks.ReleaseFromCache(node->block);
  tree_->Free(node);
  // What remains of the least recently used branch is the least recently used.
  RankPages(parent, BlockPool::Place::kFirst);
}

// Removes the node, all below it, and its root if that has nothing left. Returns the number of
// blocks.
int64_t PrefixCache::RemoveSubtree(Node* node) {
  int64_t removed = 0;
  Node* const stop = node->parent;
  while (node != stop) {
    if (node->first_child != nullptr) {
      node = node->first_child;
      continue;
    }
    Node* parent = node->parent;
    if (node->page >= 0) ++counters_.evicted_window_pages;
    RemoveLeaf(node);
    ++removed;
    node = parent;
  }
  if (stop->is_root() && stop->num_children == 0) tree_->FreeRoot(stop);
  return removed;
}

void PrefixCache::Clear() {
  const PrefixCacheCounters counters = counters_;
  while (!tree_->roots.empty()) {
    Node* root = tree_->roots.begin()->second;
    // The last child takes the root along.
    for (int32_t left = root->num_children; left > 0; --left) RemoveSubtree(root->first_child);
  }
  counters_ = counters;
}

std::string PrefixCache::FindViolation() const {
  if (std::string pool = pools_.blocks.FindViolation(); !pool.empty()) return "blocks: " + pool;
  if (std::string pool = pools_.window_pages.FindViolation(); !pool.empty())
    return "window pages: " + pool;
  int64_t num_nodes = 0;
  int64_t num_pages = 0;
  for (const auto& [salt, root] : tree_->roots) {
    if (!root->is_root() || root->parent != nullptr || root->block >= 0)
      return "the root of a salt is not a root";
    if (root->num_children == 0) return "a salt without nodes has a root";
    // In depth-first order, by the links between siblings.
    for (const Node* node = root; node != nullptr;) {
      if (!node->is_root()) {
        ++num_nodes;
        if (node->page >= 0) ++num_pages;
      }
      if (std::string wrong = FindViolationAt(node); !wrong.empty()) {
        return fmt::format("node {} at depth {} with {} tokens: {}", node->serial, node->depth,
                           node->fill, wrong);
      }
      if (node->first_child != nullptr) {
        node = node->first_child;
        continue;
      }
      while (!node->is_root() && node->next_sibling == nullptr) node = node->parent;
      node = node->is_root() ? nullptr : node->next_sibling;
    }
  }
  if (num_nodes != tree_->num_nodes)
    return fmt::format("{} nodes are in the tree and {} are counted", num_nodes, tree_->num_nodes);
  // With this, every reclaimable block and page belongs to a node, so that eviction finds it.
  int64_t cached_blocks = 0;
  for (int32_t id = 0; id < pools_.blocks.size(); ++id) cached_blocks += pools_.blocks.cached(id);
  int64_t cached_pages = 0;
  for (int32_t id = 0; id < pools_.window_pages.size(); ++id)
    cached_pages += pools_.window_pages.cached(id);
  if (cached_blocks != num_nodes)
    return fmt::format("{} blocks are cached by {} nodes", cached_blocks, num_nodes);
  if (cached_pages != num_pages)
    return fmt::format("{} window pages are cached by {} nodes", cached_pages, num_pages);
  return {};
}

std::string PrefixCache::FindViolationAt(const Node* node) const {
  int32_t num_children = 0;
  for (const Node* child = node->first_child; child != nullptr; child = child->next_sibling) {
    if (child->parent != node) return "a child has another parent";
    if (child->depth != node->depth + 1) return "a child has another depth";
    if (child->next_sibling != nullptr && child->next_sibling->previous_sibling != child)
      return "the links between its children disagree";
    ++num_children;
  }
  if (num_children != node->num_children) return "it counts its children wrongly";
  if (node->serial == 0) return "it is not in use";
  if (node->is_root()) return {};
  if (node->fill < 2 || node->fill > kBlockTokens) return "that number of tokens is not allowed";
  if (!node->is_full() && num_children > 0) return "it is partly filled and has children";
  if (node->is_full() && tree_->FindFull(node->parent, node->tokens()) != node)
    return "it is not found by its tokens";
  bool listed = false;
  const Node* newer = nullptr;
  for (const Node* other = tree_->FirstSimilar(node->parent, node->token_ids[0]);
       other != nullptr && !listed; other = other->older) {
    if (other->newer != newer) return "the links between siblings by use disagree";
    listed = other == node;
    newer = other;
  }
  if (!listed) return "it is not found by its first token";
  if (node->block < 0 || !pools_.blocks.cached(node->block)) return "its block is not cached";
  if (tree_->node_of_block[static_cast<size_t>(node->block)] != node)
    return "its block belongs to another node";
  if (node->page < 0) return {};
  if (!pools_.window_pages.cached(node->page)) return "its window page is not cached";
  if (tree_->node_of_page[static_cast<size_t>(node->page)] != node)
    return "its window page belongs to another node";
  if (pools_.window_pages.rank(node->page) != (PageIsWanted(node) ? 1 : 0))
    return "its window page has the wrong rank";
  return {};
}

}  // namespace deepinfer
