#include "runtime/drafter.h"

#include <algorithm>
#include <cmath>

#include "base/ceil_div.h"
#include "runtime/step_upload.h"
#include "tensor/copy.h"

namespace deepinfer {
namespace {

TensorView Words(const Buffer& buffer, int64_t first, DType dtype, int64_t rows, int64_t columns,
                 Device device) {
  return {static_cast<int32_t*>(buffer.data()) + first, dtype, {rows, columns}, device};
}

}  // namespace

Result<Drafter> Drafter::Create(const ModelConfig& config, int64_t block, int64_t max_sequences,
                                Stream& stream) {
  Drafter drafter;
  drafter.block_ = block;
  drafter.max_sequences_ = max_sequences;
  const int64_t bytes = 3 * block * max_sequences * 4;
  DI_ASSIGN_OR_RETURN(drafter.temperatures_, Buffer::Allocate(stream.device(), block * 4));
  DI_ASSIGN_OR_RETURN(drafter.drafts_, Buffer::Allocate(stream.device(), bytes));
  if (stream.device().kind == DeviceKind::kCuda) {
    DI_ASSIGN_OR_RETURN(drafter.host_drafts_, Buffer::AllocatePinned(bytes));
  }
  const auto sequences = static_cast<size_t>(max_sequences);
  const auto pages = static_cast<size_t>(CeilDiv(config.sliding_window, kBlockTokens) + 1);
  for (std::vector<int32_t>* values :
       {&drafter.anchors_, &drafter.lengths_, &drafter.first_page_, &drafter.window_begin_})
    values->reserve(sequences);
  drafter.window_table_.reserve(sequences * pages);
  const float one[] = {1.0f};
  DI_RETURN_IF_ERROR(drafter.SetTemperatures(one, stream));
  return drafter;
}

Status Drafter::SetTemperatures(std::span<const float> temperatures, Stream& stream) {
  const auto refuse = [](std::string message) -> Status {
    return Fail(Code::kInvalidArgument, std::move(message), "draft_temperatures");
  };
  const int64_t count = std::ssize(temperatures);
  if (count != 1 && count != block_) {
    return refuse(
        fmt::format("draft_temperatures has {} values; allowed are 1 (for all slots) and "
                    "{} (one for each drafted token).",
                    count, block_));
  }
  std::vector<float> values;
  for (int64_t k = 0; k < block_; ++k) {
    const float value = temperatures[count == 1 ? 0 : static_cast<size_t>(k)];
    if (!std::isfinite(value) || value <= 0) {
      return refuse(fmt::format("draft_temperatures[{}] is {}; allowed are positive numbers.",
                                count == 1 ? 0 : k, value));
    }
    values.push_back(value);
  }
  DI_RETURN_IF_ERROR(
      CopyToDevice(values.data(), temperatures_.View(DType::kF32, {block_}), stream));
  return stream.Synchronize();
}

Status Drafter::Validate(const ModelConfig& config, const CacheMemory& memory,
                         std::span<const DraftChunk> chunks) const {
  const auto refuse = [](const char* field, std::string message) -> Status {
    return Fail(Code::kInvalidArgument, std::move(message), field);
  };
  if (chunks.empty() || std::ssize(chunks) > max_sequences_) {
    return refuse("chunks", fmt::format("A drafting pass has {} chunks; allowed are 1 to {}.",
                                        chunks.size(), max_sequences_));
  }
  for (const DraftChunk& chunk : chunks) {
    if (chunk.anchor < 0 || chunk.anchor >= config.vocab_size) {
      return refuse("anchor", fmt::format("anchor is {}; token ids of this model are 0 to {}.",
                                          chunk.anchor, config.vocab_size - 1));
    }
    if (chunk.length < 1 || chunk.length > config.max_position_embeddings) {
      return refuse("length",
                    fmt::format("length is {}; drafts follow sequences of 1 to {} tokens.",
                                chunk.length, config.max_position_embeddings));
    }
    if (chunk.window_begin < 0 || chunk.window_begin >= chunk.length) {
      return refuse("window_begin",
                    fmt::format("window_begin is {}; a block behind {} tokens needs keys in front "
                                "of it, so allowed are 0 to {}.",
                                chunk.window_begin, chunk.length, chunk.length - 1));
    }
    const int64_t oldest =
        std::max({int64_t{0}, chunk.length - config.sliding_window, chunk.window_begin});
    const int64_t pages_end = chunk.first_window_page + std::ssize(chunk.window_pages);
    const int64_t last = (chunk.length - 1) / kBlockTokens;
    if (chunk.first_window_page < 0 || chunk.first_window_page > oldest / kBlockTokens ||
        pages_end <= last) {
      return refuse("window_pages",
                    fmt::format("A block behind {} tokens has the window pages {} to {} of its "
                                "sequence; it needs those from {} to {}.",
                                chunk.length, chunk.first_window_page, pages_end - 1,
                                oldest / kBlockTokens, last));
    }
    for (const int32_t id : chunk.window_pages) {
      if (id >= 0 && id < memory.num_window_pages()) continue;
      return refuse("window_pages",
                    fmt::format("window_pages holds the id {}; allowed are 0 to {}.", id,
                                memory.num_window_pages() - 1));
    }
  }
  return {};
}

Result<Drafts> Drafter::Run(const Model& model, const CacheViews& caches, const CacheMemory& memory,
                            std::span<const DraftChunk> chunks, const TensorView& logits,
                            bool want_logits, DraftChooser* chooser, Stream& stream) {
  DI_RETURN_IF_ERROR(Validate(model.config(), memory, chunks));
  const int64_t count = std::ssize(chunks);
  int64_t pages = 1;
  for (const DraftChunk& chunk : chunks)
    pages = std::max<int64_t>(pages, std::ssize(chunk.window_pages));
  for (std::vector<int32_t>* values :
       {&anchors_, &lengths_, &window_table_, &first_page_, &window_begin_})
    values->clear();
  for (const DraftChunk& chunk : chunks) {
    anchors_.push_back(chunk.anchor);
    lengths_.push_back(static_cast<int32_t>(chunk.length));
    first_page_.push_back(static_cast<int32_t>(chunk.first_window_page));
    window_begin_.push_back(static_cast<int32_t>(chunk.window_begin));
    window_table_.insert(window_table_.end(), chunk.window_pages.begin(), chunk.window_pages.end());
    window_table_.resize(anchors_.size() * static_cast<size_t>(pages), -1);
  }
  ScratchScope scratch(stream);
  DraftBatch batch;
  batch.block = block_;
  batch.temperatures = temperatures_.View(DType::kF32, {block_});
  StepUpload upload;
  upload.Add(anchors_, {count}, &batch.anchors);
  upload.Add(lengths_, {count}, &batch.lengths);
  upload.Add(first_page_, {count}, &batch.window_first_page);
  upload.Add(window_begin_, {count}, &batch.window_begin);
  upload.Add(window_table_, {count, pages}, &batch.window_table);
  DI_RETURN_IF_ERROR(upload.Finish(scratch, &staging_, stream));

  const int64_t size = block_ * count;
  const Device device = stream.device();
  const DraftOutput output{
      .tokens = Words(drafts_, 0, DType::kI32, block_, count, device),
      .score = Words(drafts_, size, DType::kF32, block_, count, device),
      .confidence = Words(drafts_, 2 * size, DType::kF32, block_, count, device),
      .logits = logits};
  DI_RETURN_IF_ERROR(model.Draft(batch, caches, output, chooser, stream));
  const bool on_host = device.kind == DeviceKind::kCpu;
  const Buffer& result = on_host ? drafts_ : host_drafts_;
  Drafts drafts{.tokens = Words(result, 0, DType::kI32, block_, count, {}),
                .score = Words(result, size, DType::kF32, block_, count, {}),
                .confidence = Words(result, 2 * size, DType::kF32, block_, count, {}),
                .logits = {}};
  if (on_host) {
    if (want_logits) drafts.logits = logits;
    return drafts;
  }
  if (want_logits) {
    const int64_t bytes = logits.num_elements() * 4;
    if (host_logits_.bytes() < bytes) {
      DI_ASSIGN_OR_RETURN(host_logits_, Buffer::AllocatePinned(bytes));
    }
    DI_RETURN_IF_ERROR(CopyToHost(logits, host_logits_.data(), stream));
    drafts.logits = host_logits_.View(DType::kF32, {logits.rows(), logits.dim(1)});
  }
  DI_RETURN_IF_ERROR(
      CopyToHost(drafts_.View(DType::kI32, {3 * size}), host_drafts_.data(), stream));
  return drafts;
}

}  // namespace deepinfer
