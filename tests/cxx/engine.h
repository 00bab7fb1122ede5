/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stand-in for Mooncake's transfer engine: the same names and layouts at the border, nothing
 * behind them. Its transfers move no byte; they are recorded, so that a test sees which requests
 * the library left to "Mooncake" and in which order.
 *
 * Built several times: ELEMENT_BYTES is sizeof(TransferRequest), SINCE13 adds the form of
 * submitTransfer with three arguments, WITH_TENT makes TransferEngine the border,
 * DESTRUCTOR_INLINED leaves its destructor to the callers, as 0.3.8 does. The layouts are those of
 * MOONCAKE's wheels as UPSTREAM.md lists them.
 */
#ifndef TIDEPOOL_TEST_ENGINE_H
#define TIDEPOOL_TEST_ENGINE_H

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace mooncake {

class Status {
  public:
    Status() = default;
    explicit Status(uint16_t code) : code_(code) {
    }
    Status(const Status &other) : code_(other.code_) {
    }
    ~Status() {
        delete[] message_;
    }
    uint16_t code() const {
        return code_;
    }
    bool ok() const {
        return code_ == 0;
    }

  private:
    uint16_t code_ = 0;
    const char *message_ = nullptr;
};

class Transport {
  public:
    struct TransferRequest {
        int32_t opcode;
        void *source;
        uint64_t target_id;
        uint64_t target_offset;
        size_t length;
        char more[ELEMENT_BYTES - 40];
    };
    struct TransferStatus {
        int32_t s;
        size_t transferred_bytes;
    };
    struct BufferEntry {
        void *addr;
        size_t length;
    };
};
static_assert(sizeof(Transport::TransferRequest) == ELEMENT_BYTES, "layout");

class TransferMetadata {
  public:
    struct NotifyDesc {
        std::string name, text;
    };
};

using Requests = std::vector<Transport::TransferRequest>;

/* What reached "Mooncake": target_offset of every request, in order. */
struct Record {
    std::vector<uint64_t> offsets;
    bool busy = false;   /* tasks stay unfinished */
    bool refuse = false; /* submits fail */
    int status_calls = 0;
};
Record &record();

class MultiTransport {
  public:
    MultiTransport(std::shared_ptr<TransferMetadata> metadata, std::string &local_name);
    ~MultiTransport();
    uint64_t allocateBatchID(size_t batch_size);
    Status freeBatchID(uint64_t batch_id);
    Status submitTransfer(uint64_t batch_id, const Requests &entries);
#if SINCE13
    Status submitTransfer(uint64_t batch_id, const Requests &entries,
                          std::vector<size_t> *task_sizes);
#endif
    Status getTransferStatus(uint64_t batch_id, size_t task_id, Transport::TransferStatus &status);
    Status getBatchTransferStatus(uint64_t batch_id, Transport::TransferStatus &status);

  private:
    Status add(uint64_t batch_id, const Requests &entries);
};

class TransferEngine {
  public:
    TransferEngine(bool auto_discover = false);
    TransferEngine(TransferEngine &&other) noexcept;
#if DESTRUCTOR_INLINED
    __attribute__((always_inline)) ~TransferEngine() {
        freeEngine();
    }
#else
    ~TransferEngine();
#endif
    int init(const std::string &metadata, const std::string &local_name, const std::string &host,
             uint64_t port);
    int freeEngine();
    std::string getLocalIpAndPort();
    uint64_t openSegment(const std::string &name);
    int closeSegment(uint64_t handle);
    int registerLocalMemory(void *address, size_t bytes, const std::string &location,
                            bool remote_accessible, bool update_metadata);
    int unregisterLocalMemory(void *address, bool update_metadata);
    int registerLocalMemoryBatch(const std::vector<Transport::BufferEntry> &buffers,
                                 const std::string &location);
    int unregisterLocalMemoryBatch(const std::vector<void *> &addresses);
    uint64_t allocateBatchID(size_t batch_size);
    Status freeBatchID(uint64_t batch_id);
    Status submitTransfer(uint64_t batch_id, const Requests &entries);
    Status submitTransferWithNotify(uint64_t batch_id, const Requests &entries,
                                    TransferMetadata::NotifyDesc notify);
    Status getTransferStatus(uint64_t batch_id, size_t task_id, Transport::TransferStatus &status);
    Status getBatchTransferStatus(uint64_t batch_id, Transport::TransferStatus &status);
    /* as TransferEngine::submitScatter does: a batch of size 0 and the form with three arguments */
    uint64_t scatter(const Requests &entries, std::vector<size_t> &task_sizes);

  private:
    std::shared_ptr<MultiTransport> multi_;
    std::string name_;
    std::vector<std::string> segments_;
};

class Client {
  public:
    int MountSegment(const void *buffer, size_t size);
};

#if ELEMENT_BYTES == 48
void *allocate_buffer_allocator_memory(size_t bytes, const std::string &protocol, size_t alignment);
void free_memory(const std::string &protocol, void *address);
#elif ELEMENT_BYTES == 56
void *allocate_buffer_allocator_memory(size_t bytes, const std::string &protocol, size_t alignment,
                                       bool flag);
void free_memory(const std::string &protocol, void *address, bool flag);
#else
class DmaBufferAllocator;
void *allocate_buffer_allocator_memory(size_t bytes, const std::string &protocol, size_t alignment,
                                       DmaBufferAllocator *allocator);
void free_memory(const std::string &protocol, void *address, DmaBufferAllocator *allocator);
#endif

} // namespace mooncake

#endif
