// `deepinfer bench ops`, `bench decode` and `bench prefill`: speed against what this machine can
// do, measured in the same run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace deepinfer {

struct BenchOpsOptions {
  int threads = 0;          // 0: one per usable core
  int runs = 9;             // per case; the median is reported
  bool all_levels = false;  // every instruction-set level of the host, not only the best
  bool compare = true;      // time oneDNN beside, where this build has it
  std::string filter;       // only cases whose name contains this
  std::string json;         // file for the results; empty: none
};
int RunBenchOps(const BenchOpsOptions& options);

struct BenchDecodeOptions {
  std::string model_dir;
  std::string device = "auto";
  int threads = 0;      // 0: one per usable core
  int64_t batch = 1;    // sequences that decode together
  int64_t prompt = 64;  // tokens of each prompt (random ids)
  int64_t tokens = 32;  // decode steps timed
  std::string cache_format = "packed";
  std::string json;  // file for the results; empty: none
};
// Whole-model decode: tokens per second, and the share of the bandwidth bound (weights read per
// step over measured read bandwidth). Also the prefill rate of the prompts.
int RunBenchDecode(const BenchDecodeOptions& options);

struct BenchServeOptions {
  std::string model_dir;
  std::string device = "auto";
  int threads = 0;  // 0: one per usable core
  // Requests that run at once, one measurement each.
  std::vector<int64_t> concurrency = {1, 32};
  int64_t prompt = 32;  // tokens of each prompt (random ids)
  int64_t tokens = 32;  // of each output
  std::string json;     // file for the results; empty: none
};
// Output tokens per second of the whole engine.
int RunBenchServe(const BenchServeOptions& options);

struct BenchHostOptions {
  std::string model_dir;   // for its tokenizer, and for the model if there is a device
  std::string device;      // a CUDA device that runs the model; empty: a model that costs nothing
  int64_t context = 2048;  // tokens of each running sequence
  int64_t steps = 400;     // timed
  std::string json;        // file for the results; empty: none
};
// Host time per decode step at 1, 256 and 1,024 running sequences: of the engine's own thread on a
// model that costs nothing, or of all threads while the device runs the steps.
int RunBenchHost(const BenchHostOptions& options);

struct BenchGrammarOptions {
  std::string tokenizer;  // tokenizer.json
  std::string schemas = "bench/grammar_schemas.jsonl";
  int64_t rounds = 3;  // over each document
  std::string json;    // file for the results; empty: none
};
// Schemas compiled and followed along documents: time per mask, per accepted token and per
// compilation, and memory.
int RunBenchGrammar(const BenchGrammarOptions& options);

struct BenchPrefillOptions {
  std::string model_dir;
  std::string device = "auto";
  int threads = 0;        // 0: one per usable core
  int64_t tokens = 4096;  // of the prompt (random ids)
  int64_t chunk = 2048;   // rows of a step
  std::string replay = "off";
  int64_t keep = 0;  // last tokens that run the decoder half, with replay; 0: window + 12
  int64_t runs = 3;  // timed; the median is reported
  std::string cache_format = "packed";
  std::string json;  // file for the results; empty: none
};
// Whole-model prefill of one prompt: tokens per second, with or without bounded replay of the
// decoder half.
int RunBenchPrefill(const BenchPrefillOptions& options);

struct BenchSliceOptions {
  std::string device = "auto";  // a CUDA device
  int threads = 0;              // that make the weights; 0: one per usable core
  int64_t layers = 40;
  int64_t ep = 64;       // ranks that share the experts of a layer
  int64_t batch = 256;   // sequences that decode together on the rank
  int64_t context = -1;  // tokens of each; with prefill: before the new ones. -1: 131,072, or none
  int64_t prefill = 0;   // new tokens of one prompt; 0: a decode step
  int64_t replay = 140;  // of these, the last ones that run the decoder half
  int64_t engram_rows = int64_t{1} << 22;  // of each n-gram table
  int runs = 30;                           // timed steps
  uint64_t seed = 0;
  std::string json = {};  // file for the results; empty: none
};
// One rank's share of an expert-parallel deployment at the released widths, with random weights and
// full caches, without the wire: tokens per second against the device's bound, and time by parts.
int RunBenchSlice(const BenchSliceOptions& options);

struct BenchLayerOptions {
  std::string device = "auto";                // a CUDA device
  int threads = 0;                            // that make the weights; 0: one per usable core
  std::vector<int64_t> batch = {1, 64, 256};  // sequences that decode together, a case each
  int64_t context = 8192;                     // tokens of each
  int runs = 30;                              // timed steps
  uint64_t seed = 0;
  std::string json = {};  // file for the results; empty: none
};
// A plain layer of a decode step on one device that holds all experts: its time against the
// roofline, and by parts.
int RunBenchLayer(const BenchLayerOptions& options);

}  // namespace deepinfer
