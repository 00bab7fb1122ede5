/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in's body: see engine.h. Everything is out of line, so that calls go through the PLT as
 * in the real modules. */
#include "engine.h"

#include <cstdlib>
#include <unistd.h>

namespace mooncake {

namespace {
struct BatchDesc {
    uint64_t id;
    size_t batch_size;
    std::vector<size_t> lengths;
};
BatchDesc &desc(uint64_t batch_id) {
    return *reinterpret_cast<BatchDesc *>(batch_id);
}
} // namespace

Record &record() {
    static Record it;
    return it;
}

MultiTransport::MultiTransport(std::shared_ptr<TransferMetadata>, std::string &) {
}
MultiTransport::~MultiTransport() {
}
uint64_t MultiTransport::allocateBatchID(size_t batch_size) {
    auto *batch = new BatchDesc{0, batch_size, {}};
    batch->id = reinterpret_cast<uint64_t>(batch);
    return batch->id;
}
Status MultiTransport::freeBatchID(uint64_t batch_id) {
    if (record().busy && !desc(batch_id).lengths.empty())
        return Status(4);
    delete &desc(batch_id);
    return Status();
}
Status MultiTransport::add(uint64_t batch_id, const Requests &entries) {
    if (record().refuse)
        return Status(1);
    for (const auto &entry : entries) {
        record().offsets.push_back(entry.target_offset);
        desc(batch_id).lengths.push_back(entry.length);
    }
    return Status();
}
#if SINCE13
Status MultiTransport::submitTransfer(uint64_t batch_id, const Requests &entries) {
    return submitTransfer(batch_id, entries, nullptr);
}
Status MultiTransport::submitTransfer(uint64_t batch_id, const Requests &entries,
                                      std::vector<size_t> *task_sizes) {
    if (task_sizes)
        for (size_t i = 0; i < entries.size(); i++)
            task_sizes->push_back(1);
    return add(batch_id, entries);
}
#else
Status MultiTransport::submitTransfer(uint64_t batch_id, const Requests &entries) {
    return add(batch_id, entries);
}
#endif
Status MultiTransport::getTransferStatus(uint64_t batch_id, size_t task_id,
                                         Transport::TransferStatus &status) {
    record().status_calls++;
    if (task_id >= desc(batch_id).lengths.size())
        return Status(1);
    status.s = record().busy ? 0 : 4;
    status.transferred_bytes = record().busy ? 0 : desc(batch_id).lengths[task_id];
    return Status();
}
Status MultiTransport::getBatchTransferStatus(uint64_t batch_id,
                                              Transport::TransferStatus &status) {
    status.transferred_bytes = 0;
    status.s = record().busy && !desc(batch_id).lengths.empty() ? 0 : 4;
    if (status.s == 4)
        for (size_t length : desc(batch_id).lengths)
            status.transferred_bytes += length;
    return Status();
}

TransferEngine::TransferEngine(bool) {
}
TransferEngine::TransferEngine(TransferEngine &&other) noexcept
    : multi_(std::move(other.multi_)), name_(std::move(other.name_)),
      segments_(std::move(other.segments_)) {
}
#if !DESTRUCTOR_INLINED
TransferEngine::~TransferEngine() {
    freeEngine();
}
#endif
int TransferEngine::init(const std::string &, const std::string &local_name, const std::string &,
                         uint64_t) {
    std::string name = local_name;
    multi_ = std::make_shared<MultiTransport>(nullptr, name);
    const char *given = getenv("FAKE_ENGINE_NAME");
    name_ = given ? given : local_name;
    segments_.push_back("self");
    return 0;
}
int TransferEngine::freeEngine() {
    multi_.reset();
    return 0;
}
std::string TransferEngine::getLocalIpAndPort() {
    return name_;
}
uint64_t TransferEngine::openSegment(const std::string &name) {
    for (size_t i = 0; i < segments_.size(); i++)
        if (segments_[i] == name)
            return i;
    segments_.push_back(name);
    return segments_.size() - 1;
}
int TransferEngine::closeSegment(uint64_t) {
    return 0;
}
int TransferEngine::registerLocalMemory(void *, size_t, const std::string &, bool, bool) {
    return 0;
}
int TransferEngine::unregisterLocalMemory(void *, bool) {
    return 0;
}
int TransferEngine::registerLocalMemoryBatch(const std::vector<Transport::BufferEntry> &,
                                             const std::string &) {
    return 0;
}
int TransferEngine::unregisterLocalMemoryBatch(const std::vector<void *> &) {
    return 0;
}
uint64_t TransferEngine::allocateBatchID(size_t batch_size) {
    return multi_->allocateBatchID(batch_size);
}
Status TransferEngine::freeBatchID(uint64_t batch_id) {
    return multi_->freeBatchID(batch_id);
}
Status TransferEngine::submitTransfer(uint64_t batch_id, const Requests &entries) {
    return multi_->submitTransfer(batch_id, entries);
}
Status TransferEngine::submitTransferWithNotify(uint64_t batch_id, const Requests &entries,
                                                TransferMetadata::NotifyDesc) {
    return multi_->submitTransfer(batch_id, entries);
}
Status TransferEngine::getTransferStatus(uint64_t batch_id, size_t task_id,
                                         Transport::TransferStatus &status) {
    return multi_->getTransferStatus(batch_id, task_id, status);
}
Status TransferEngine::getBatchTransferStatus(uint64_t batch_id,
                                              Transport::TransferStatus &status) {
    return multi_->getBatchTransferStatus(batch_id, status);
}
uint64_t TransferEngine::scatter(const Requests &entries, std::vector<size_t> &task_sizes) {
    uint64_t batch_id = multi_->allocateBatchID(0);
#if SINCE13
    if (!multi_->submitTransfer(batch_id, entries, &task_sizes).ok())
        return 0;
#else
    (void)entries;
    (void)task_sizes;
#endif
    return batch_id;
}

int Client::MountSegment(const void *, size_t) {
    return 0;
}

#if ELEMENT_BYTES == 48
void *allocate_buffer_allocator_memory(size_t bytes, const std::string &, size_t alignment) {
    return aligned_alloc(alignment, bytes);
}
void free_memory(const std::string &, void *address) {
    free(address);
}
#elif ELEMENT_BYTES == 56
void *allocate_buffer_allocator_memory(size_t bytes, const std::string &, size_t alignment, bool) {
    return aligned_alloc(alignment, bytes);
}
void free_memory(const std::string &, void *address, bool) {
    free(address);
}
#else
void *allocate_buffer_allocator_memory(size_t bytes, const std::string &, size_t alignment,
                                       DmaBufferAllocator *) {
    return aligned_alloc(alignment, bytes);
}
void free_memory(const std::string &, void *address, DmaBufferAllocator *) {
    free(address);
}
#endif

#if WITH_TENT
namespace tent {
std::string getMachineID();
std::string getMachineID() {
    return "test";
}
} // namespace tent
#endif

} // namespace mooncake

/* Store modules of the wheels export it as a weak symbol; the library measures the element with it.
 */
template void std::vector<mooncake::Transport::TransferRequest>::reserve(size_t);
